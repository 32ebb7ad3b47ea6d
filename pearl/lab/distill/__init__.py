"""Train a draft: distillation on the target's own answers.

    config       every setting of a run
    teacher      the loaded target: its model, tokenizer, and how it encodes prompts
    benchmarks   recognises benchmark prompts, which are never trained on
    prompts      from files, and invented by the target
    answers      batched generation, with the likeliest tokens of every step
    draft        builds the model to train, and exports it
    loss         the training loss
    learning     batches, schedules, optimizers and the training step
    run          the rounds of answering and learning, and its files

It must not know processes, windows or the protocol: the draft is an ordinary checkpoint.
"""
