"""Derives the seed that each request sends to its server.

Guarantees: the seed of a request depends on the episode's seed, the role, the number of the call, the number of the
sample in it, and the number of tokens that the answer has already; requests that differ in one of them draw independent
random numbers on every kind of server, and the same run sends the same seeds again.

A server may begin a seed's random numbers anew with each request (vLLM, the embedded engine) or key them by seed and
position (SGLang). An answer that was aborted and goes on as a new request would repeat its first random numbers on a
server of the first kind, so it goes on with a seed of its own.
"""

from hashlib import blake2b

SEED_BITS = 31  # servers keep seeds in 32 bits with a sign, or in more


def stream_seed(*key: int | str | None) -> int:
    """Hashes a key to a seed of 31 bits that is the same in every process; similar keys have unrelated seeds."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def request_seed(call: int | None, taken: int) -> int | None:
    """Returns the seed of a request whose answer has ``taken`` tokens already; ``None`` where the call has none.

    Args:
        call: Seed of the sample, the same for all requests that its answer takes.
        taken: Number of tokens that earlier, aborted requests sampled.
    """
    return None if call is None else stream_seed(call, taken)
