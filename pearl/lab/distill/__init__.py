"""Train and evaluate a draft: distillation on the target's own answers, and the acceptance rate to expect.

    config       every setting of a run
    teacher      the loaded target: its model, tokenizer, and how it encodes prompts
    benchmarks   recognises benchmark prompts, which are never trained on
    prompts      from files, and invented by the target
    answers      batched generation, with the likeliest tokens of every step
    shards       answers on disk
    draft        builds the model to train, and exports it
    loss, plan   the training loss; batches, seeds and the learning rate
    checkpoints  training state, to resume a run
    run          the rounds of answering and learning
    evaluate     compares a draft with the target on the target's answers; plot draws the result

It must not know processes, windows or the protocol: the draft is an ordinary checkpoint.
"""
