"""Train a draft: distillation on the target's own answers.

    config       every setting of a run
    pair         the loaded target, its encoding of prompts, and the draft to train
    benchmarks   recognises benchmark prompts, which are never trained on
    prompts      reads prompts from files
    answers      batched generation, with the likeliest tokens of every step
    invention    prompts that the target invents
    loss         the training loss of a draft
    learning     batches, schedules, optimizers and the training step of a draft
    states       answers and hidden states on disk, for the training of a head
    heads        heads to train instead of a draft, by speculators
    run          the rounds of answering and learning, and its files

This package must not know processes, windows or the protocol: the trained draft is an ordinary
checkpoint.
"""
