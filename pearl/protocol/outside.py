"""How a draft service drafts for another engine, such as vLLM, which verifies the draft tokens.

The other engine reports the tokens that it has committed.  It may sample with any settings, but the
draft is always greedy.  The engine accepts a draft token with the target's probability of that
token.  As far as the draft can tell, this probability is highest for the draft's likeliest token.
"""

from pearl.config.options import RequestOptions

#: The request options with which a service drafts: method pearl, greedy.
OPTIONS = RequestOptions(method="pearl", temperature=0.0).resolved()
#: Name of the error with which a service refuses one request for the time being.
REFUSED = "RequestError"


def can_serve(options: RequestOptions) -> bool:
    """Return whether a draft service takes requests with these options.

    A draft service drafts greedily, token by token, without penalties, biases or grammars.
    """
    is_greedy = options.temperature == 0 and options.rule_in_force.block(options.parameters) == 1
    return options.method == OPTIONS.method and is_greedy and not options.shapes_logits
