"""`pearl simulate record`: texts of a pair, with what its draft thought of each token, in one file."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec import structs

from pearl.cli.console import SafeConsole
from pearl.cli.options import SettingsCommand, settings_options
from pearl.config import Settings
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_turns
from pearl.models.tokenizers import load_tokenizer
from pearl.text.tokenizer import check_same_vocabulary

_TOKENS = 128  # of an answer, where --max-tokens does not say


@click.command(cls=SettingsCommand)
@click.argument("prompts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="To write.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts of each file.  [default: all]")
@click.option("--raw", is_flag=True, help="Take prompts as they are: no chat template.")
@settings_options
def record(settings: Settings, prompts: tuple[Path, ...], out: Path, limit: int | None, raw: bool) -> None:
    """Record answers of the target, with the tokens that the draft holds likeliest at each position.

    PROMPTS are files as pearl bench reads them (.jsonl with prompt, question or turns; or a line each). Greedy unless
    --temperature says otherwise; then the texts are those of the coupled rule. What is recorded can be replayed at any
    speed: by pearl simulate --texts FILE, and in real processes as the models replay:FILE.
    """
    from pearl.engine.request import resolve_sampling
    from pearl.lab.experiments.recording import record as recording
    from pearl.models.recorded import Header, write_texts
    from pearl.worker.build import make_runner, place

    config = settings.engine
    if not config.has_draft:
        raise ConfigError("--draft none: what is recorded is what a draft would have said")
    conversations = [turns for path in prompts for turns in read_turns(path, limit)]
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    own, _ = load_tokenizer(config.draft, trust_remote_code=config.trust_remote_code)
    check_same_vocabulary(tokenizer, own, config.target, config.draft)
    given = settings.sampling
    asked = {"temperature": given.temperature or 0.0, "seed": given.seed or 0}
    if given.repetition_penalty is None:  # a checkpoint's own is left out
        asked["repetition_penalty"] = 1.0
    sampling = structs.asdict(resolve_sampling(given.model_copy(update=asked), defaults, 0))
    if sampling.pop("shaping") is not None:
        raise ConfigError("a recording has the models' own logits: leave out penalties and logit_bias")
    sampling.pop("sample")
    with SafeConsole(stderr=True).status("loading the models") as status:
        target, draft = (make_runner(config.model(role), place(config, role)) for role in config.roles)
        header = Header(
            target=config.target,
            draft=config.draft,
            vocab_size=target.vocab_size,
            eos=() if given.ignore_eos else defaults.eos,
            max_tokens=given.max_tokens or _TOKENS,
            **sampling,
        )
        texts = list(recording(target, draft, tokenizer, conversations, header, raw=raw, tick=status.update))
    if not texts:
        raise ConfigError("no prompt fits the context: shorten them, lower max_tokens, or raise max_context")
    write_texts(out, header, texts)
    tokens = sum(len(text.answer) for text in texts)
    click.echo(f"{out}: {len(texts)} texts, {tokens} tokens, {out.stat().st_size / 1e6:.1f} MB")
