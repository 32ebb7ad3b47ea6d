"""The colours of tokens and of work, in the chat, the server's page and pictures: readable on white and on black."""

# Source of a committed token, as `pearl.protocol.messages.Provenance` names it -> colour, meaning.
SOURCES = {
    "accepted": ("#2a9d4a", "drafted, accepted"),
    "corrected": ("#d97706", "corrected"),
    "guessed": ("#2f7fd6", "guessed otherwise"),
    "bonus": ("#b848b8", "bonus"),
    "direct": ("#7d868f", "the target's own"),
}
# Kind of work, or outcome of a draft token -> colour, meaning.
WORK = {
    "prefill": ("#7b6fc4", "reading the prompt (prefill)"),
    "pre-verify": ("#5aa9e6", "target forward without draft tokens (pre-verify)"),
    "post-verify": ("#1f6fb2", "target forward over draft tokens (post-verify)"),
    "accepted": (SOURCES["accepted"][0], "draft token, accepted"),
    "rejected": ("#d1495b", "draft token, rejected"),
    "discarded": ("#c9a27a", "draft token after a rejected one, discarded"),
    "prepare": ("#8fbf6a", "draft forward for other outcomes alone (branches)"),
    "draft": ("#9a9a9a", "draft forward whose tokens no verdict judged"),
    "other": ("#6b6b6b", "judging, sampling, messages"),
    "wait": ("#b0900066", "waiting"),  # translucent: text on it stays readable
}


def style_sheet() -> str:
    """Return `SOURCES` and `WORK` as CSS variables: "--token-accepted: #2a9d4a; ... --work-prefill: #7b6fc4; ... "."""
    variables = []
    for group, colours in (("token", SOURCES), ("work", WORK)):
        for name, (colour, _) in colours.items():
            variables.append(f"--{group}-{name}: {colour}; ")
    return "".join(variables)
