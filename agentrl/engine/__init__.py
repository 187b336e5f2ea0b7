"""The embedded inference engine: an HTTP server over any Hugging Face causal language model, on CPU or GPU.

Guarantees: importing this package imports neither torch nor transformers; the server speaks the part of SGLang's HTTP
contract that training needs, so a client cannot tell the two apart on that part.

Start it with ``python -m agentrl.engine --model DIR``, or call
:func:`agentrl.engine.__main__.main`.
"""

KEPT_TOKENS = 16384  # default size of the prefix cache: keys and values take 750 MB for a 135M model in float32
