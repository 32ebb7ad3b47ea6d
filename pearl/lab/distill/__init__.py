"""Train a draft: distillation on the target's own answers.

    config       every setting of a run
    pair         the loaded target and how it encodes prompts; the draft to train, and its states
    benchmarks   recognises benchmark prompts, which are never trained on
    prompts      from files
    answers      batched generation, with the likeliest tokens of every step
    invention    prompts that the target invents
    head         a head to train in place of a draft
    loss         the training loss
    learning     batches, schedules, optimizers and the training step
    run          the rounds of answering and learning, and its files

It must not know processes, windows or the protocol: the draft is an ordinary checkpoint.
"""
