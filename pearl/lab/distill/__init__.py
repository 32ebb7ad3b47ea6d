"""Making and judging a draft: distillation of a target on its own answers, and how often the target would accept.

    config       every setting of a run
    teacher      the target as a teacher: its model, tokenizer, and prompts as it reads them
    benchmarks   what must not be trained on
    prompts      from files, and invented by the target
    answers      batched generation that records the likeliest tokens of every step
    shards       answers on disk
    draft        which model is trained, and the directory that comes out
    loss, plan   what a step minimises, and on which answers
    checkpoints  what a run is continued from
    run          the rounds
    evaluate     a draft against the target's own answers; plot draws it

It must not know processes, windows or the protocol: a draft that comes out is an ordinary checkpoint.
"""
