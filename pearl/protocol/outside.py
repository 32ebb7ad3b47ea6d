"""What a draft service and the other engine that it drafts for (vLLM) agree on, besides the messages.

The other engine verifies draft tokens by itself, and reports the tokens that it has committed.  It may sample with any
settings, and the draft is greedy nevertheless: a drafted token is accepted with the target's probability of it, which
is largest, as far as the draft can tell, for the draft's likeliest token.
"""

from pearl.config.options import RequestOptions

#: How a service drafts: PEARL, greedily.
OPTIONS = RequestOptions(method="pearl", temperature=0.0).resolved()
#: Name of the error by which a service refuses one request for now.
REFUSED = "RequestError"


def can_serve(options: RequestOptions) -> bool:
    """Return whether a draft service takes requests with these options: it drafts greedily, from unchanged logits."""
    is_greedy = options.temperature == 0 and options.rule_in_force.block(options.parameters) == 1
    return options.method == OPTIONS.method and is_greedy and not options.shapes_logits
