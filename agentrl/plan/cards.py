"""Published figures of accelerators: memory, peak rates, bandwidths.

Guarantees: rates are dense (without sparsity), bandwidths are those of one direction, and each card names the source of
its figures. The figures of ``cpu`` were measured, not published.

Sources. Data sheets give rates with sparsity, twice the dense ones, and links in both directions, twice ours. What is
marked "second hand" was compared with pages that quote the document, not with the document itself.

* H100 SXM: data sheet https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (1,979 TFLOP/s
  with sparsity; 3.35 TB/s; NVLink 900 GB/s; PCIe gen 5 128 GB/s; FP32 67), second hand:
  https://glennklockwood.com/garden/processors/h100. DGX H100: eight ports of 400 Gb/s for eight cards.
* H200 SXM: data sheet
  https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200 (141 GB;
  4.8 TB/s; rates and links of the H100), second hand.
* B200: DGX B200 (1,440 GB and 72 PFLOP/s of FP8 with sparsity for eight cards: 180 GB, and a quarter of 9 PFLOP/s dense
  in BF16; 64 TB/s; NVLink 1.8 TB/s; eight ports of 400 Gb/s), second hand; FP32 of the HGX B200 page was not seen
  again.
* A100 SXM: data sheet
  https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
  (312; FP32 19.5; 2,039 and 1,555 GB/s; NVLink 600 GB/s; PCIe gen 4 64 GB/s), second hand:
  https://glennklockwood.com/garden/processors/A100. DGX A100: eight ports of 200 Gb/s.
* L40S: data sheet (733 TFLOP/s of BF16 with sparsity, 362.05 dense; FP32 91.6; 864 GB/s; PCIe gen 4 64 GB/s), second
  hand: https://www.mullet.se/product.html?product_id=355414. It has no NVLink. Its network is assumed.
* RTX 4090: Ada architecture white paper
  https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, appendix A (1,008 GB/s; FP32
  82.6; BF16 with float32 sums 165.2), of which the first two were seen second hand. Its network is assumed.
* MI300X: data sheet of AMD (1,307.4 TFLOP/s; FP32 163.4; 5.3 TB/s; seven Infinity Fabric links of 128 GB/s in both
  directions: 448 GB/s in one), second hand. Network: eight ports of 400 Gb/s, as in Azure's ND MI300X v5.
"""

import difflib
from dataclasses import dataclass

from agentrl.config.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """An accelerator.

    Attributes:
        name: Name on the command line.
        memory_gb: Memory, in 10^9 bytes.
        bfloat16_tflops: Dense peak of bfloat16 products with float32 sums.
        float32_tflops: Peak of float32 arithmetic without tensor cores.
        bandwidth_gbs: Memory bandwidth in GB/s.
        link_gbs: GB/s of one direction to the other cards of its machine.
        network_gbs: GB/s of one direction to other machines, for each card.
        host_gbs: GB/s of one direction between the card and its machine's memory.
        source: Source of these figures.
    """

    name: str
    memory_gb: float
    bfloat16_tflops: float
    float32_tflops: float
    bandwidth_gbs: float
    link_gbs: float
    network_gbs: float
    host_gbs: float
    source: str

    def peak_tflops(self, dtype: str) -> float:
        """Returns the peak of a dtype, ``bfloat16`` or ``float32``."""
        return self.bfloat16_tflops if dtype == "bfloat16" else self.float32_tflops


CARDS = {
    card.name: card
    for card in (
        Card("h100", 80, 989, 67, 3350, 450, 50, 64, "NVIDIA H100 SXM data sheet; DGX H100: 8 x 400 Gb/s"),
        Card("h200", 141, 989, 67, 4800, 450, 50, 64, "NVIDIA H200 SXM data sheet; DGX H200: 8 x 400 Gb/s"),
        Card("b200", 180, 2250, 75, 8000, 900, 50, 64, "NVIDIA HGX and DGX B200 data sheets, an eighth of 8 cards"),
        Card("a100", 80, 312, 19.5, 2039, 300, 25, 32, "NVIDIA A100 80GB SXM data sheet; DGX A100: 8 x 200 Gb/s"),
        Card("a100-40", 40, 312, 19.5, 1555, 300, 25, 32, "NVIDIA A100 40GB SXM data sheet; DGX A100: 8 x 200 Gb/s"),
        Card("l40s", 48, 362, 91.6, 864, 32, 6.25, 32, "NVIDIA L40S data sheet; network assumed: 400 Gb/s for 8"),
        Card("4090", 24, 165.2, 82.6, 1008, 32, 1.5, 32, "NVIDIA Ada white paper; network assumed: 100 Gb/s for 8"),
        Card("mi300x", 192, 1307.4, 163.4, 5300, 448, 50, 64, "AMD MI300X data sheet; Azure ND MI300X: 8 x 400 Gb/s"),
        Card("cpu", 24, 0.43, 0.11, 32, 5, 1.25, 5, "ours on two cores (Zen 4; float32: Zen 3), docs/performance.md; "
             "--probe measures yours"),
    )
}  # fmt: skip


def find_card(name: str) -> Card:
    """Returns a card by its name, in any case and with or without the maker's name.

    Raises:
        ConfigError: There is no such card.
    """
    plain = name.lower().replace("nvidia", "").replace("amd", "").replace("rtx", "").strip(" -_").replace("_", "-")
    aliases = {"a100-80": "a100", "a100-80gb": "a100", "a100-40gb": "a100-40"}
    plain = aliases.get(plain, plain)
    if plain in CARDS:
        return CARDS[plain]
    near = difflib.get_close_matches(plain, CARDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"--gpu {name}: no such card{hint} Known: {', '.join(CARDS)}. For another one take the nearest and set its "
        "figures: --assume memory_gb=96 --assume peak_tflops=1000 --assume bandwidth_gbs=4000"
    )
