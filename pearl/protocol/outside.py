"""What a draft service and the engines outside that it drafts for (vLLM) agree on beside the messages.

The other engine verifies by itself and says what it committed.  A greedy draft serves every sampling setting of its:
it accepts a proposed token with the target's own probability of it, which the draft's likeliest token maximises.
"""

from pearl.config.options import RequestOptions

#: How a service drafts: PEARL, greedily.
OPTIONS = RequestOptions(method="pearl", temperature=0.0).resolved()
#: Name of the error by which a service refuses one request for now.
REFUSED = "RequestError"


def can_serve(options: RequestOptions) -> bool:
    """Whether a service drafts by these options: greedily, by logits that the text before does not change."""
    is_greedy = options.temperature == 0 and options.rule_in_force.block(options.parameters) == 1
    return options.method == OPTIONS.method and is_greedy and not options.shapes_logits
