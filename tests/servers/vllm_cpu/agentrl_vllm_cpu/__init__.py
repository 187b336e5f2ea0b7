"""vLLM 0.32 on a CPU multiplies with packed copies of its weights, and after ``reload_weights`` packs them anew.

It forgets the output head where that is tied to the embeddings: hidden states are then of the new weights and logits of
the old head, without any sign. It forgets experts too, and takes the new ones for packed. This plugin packs both. On a
GPU nothing is packed.

It ends, too, when the prompt of a request with a seed does not fit into one step: it sets the request's generator back
by an offset, which a CPU's generator does not have. Here the generator gets its state back.
"""

from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # type: ignore[import-not-found]
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # type: ignore[import-not-found]
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

    reload_weights = GPUModelRunner.reload_weights

    def reload_and_pack(self: Any, *args: Any, **kwargs: Any) -> None:
        reload_weights(self, *args, **kwargs)
        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    GPUModelRunner.reload_weights = reload_and_pack

    setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup_and_pack(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        again = self.moe_kernel is not None
        setup(self, layer, *args, **kwargs)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack

    sample, bookkeep = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def unfinished(self: Any) -> list[int]:
        batch = self.input_batch
        waiting = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        return [int(index) for index in waiting if int(index) in batch.generators]

    def sample_and_set_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        states = {index: generators[index].get_state() for index in unfinished(self)}
        found = sample(self, *args, **kwargs)
        for index, state in states.items():
            generators[index].set_state(state)
        return found

    def bookkeep_without(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {index: generators.pop(index) for index in unfinished(self)}
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = sample_and_set_back, bookkeep_without
