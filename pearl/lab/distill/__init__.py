"""Train a draft: distillation on the target's own answers.

    config       every setting of a run
    pair         the loaded target, its encoding of prompts, and the draft to train
    benchmarks   recognises benchmark prompts, which are never trained on
    prompts      reads prompts from files
    answers      batched generation, with the likeliest tokens of every step
    invention    prompts that the target invents
    head         an EAGLE-3 head to train instead of a draft model
    states       writes the target's hidden states, from which a block drafter is trained
    blocks       a block drafter to train instead of a draft model
    loss         the training loss
    learning     batches, schedules, optimizers and the training step
    run          the rounds of answering and learning, and the files of a run

This package must not know processes, windows or the protocol: the trained draft is an ordinary
checkpoint.
"""
