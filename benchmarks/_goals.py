"""What the project aims at, as ratios of two figures from one process on one GPU, interleaved, medians, caches cold unless said."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Goal:
    """One ratio; it is better the larger it is, unless `limit` is its lower end.

    Attributes:
        name: K kernels, A attention, M models, T training, S startup.
        what: the two sides.
        floor: what a release must reach.
        goal: good.
        moonshot: the best that the hardware plausibly gives.
        limit: the physical bound, where there is one.
    """

    name: str
    what: str
    floor: str
    goal: str
    moonshot: str
    limit: str = ""


GOALS = (
    Goal(
        "K1",
        "jitted jnp rotation / kernel in place, geometric mean over the 300 sizes (16-32)",
        "1.0, none < 0.95",
        "1.25",
        "1.38",
        "1.40-1.46",
    ),
    Goal("K2", "the same, sizes of at least 10 us at copy bandwidth with C >= 64", "1.3", "1.6", "1.85", "2.0"),
    Goal("K3", "needed bytes over time / copy bandwidth, sizes of at least 20 us with C >= 64", "0.80", "0.90", "0.97", "1.0"),
    Goal(
        "K4", "time / that of an empty kernel, sizes under 1 us at copy bandwidth, cache hot (lower is better)", "1.5", "1.2", "1.05", "1.0"
    ),
    Goal("K5", "jnp operation by operation / kernel, mean over the 300 sizes, cache hot (the thesis' protocol)", "6", "11.2", "20", ""),
    Goal("K6", "torch.compile's rotation in place / kernel, CUDA graphs", "1.0", "1.2", "1.4", "2"),
    Goal("K7", "gradients of q and k turned back one by one, then concatenated with v's / one packing pass", "1.3", "2.0", "2.5", ""),
    Goal(
        "A1",
        "jnp rotation and cuDNN attention / attention with the rotation inside, ViT, 196 tokens, forward",
        "1.0",
        "1.4",
        "1.8",
        "2.0-2.5",
    ),
    Goal("A2", "attention with rotation / without (lower is better)", "1.10", "1.04", "1.01", "1.0"),
    Goal("A3", "Swin window attention in XLA / kernel, forward", "1.5", "3", "5", ""),
    Goal("A4", "the same forward and backward, XLA's side with a bias table", "1.2", "2", "3", ""),
    Goal("A5", "dense cuDNN attention / neighbourhood attention, K = 7, 56x56", "2", "5", "10", "11"),
    Goal("A6", "neighbourhood attention / a copy of its arrays (lower is better)", "4", "2", "1.3", "1.0"),
    Goal(
        "M1",
        "images/s without position / with per-head axial RoPE, ViT-S and ViT-B, each by its fastest attention (lower is better)",
        "1.05",
        "1.02",
        "1.005",
        "1.0",
    ),
    Goal("M2", "images/s, ViT-S and ViT-B with RoPE-Mixed, forward / timm's with torch.compile", "1.0", "1.2", "1.4", ""),
    Goal(
        "M3",
        "images/s with axial RoPE / with a bias table, each by its fastest attention: ViT-S, Swin-T, NAT-Mini",
        "1.00 all",
        "1.06, 1.05, 1.02",
        "1.15, 1.15, 1.10",
        "",
    ),
    Goal(
        "M4",
        "images/s with axial RoPE / serial roofline at the rates of the same run: ViT-B, ViT-S, Swin-T, NAT-Mini",
        ".55, .45, .25, .22",
        ".75, .60, .45, .40",
        ".90, .80, .65, .60",
        "1.0",
    ),
    Goal(
        "T1",
        "training step of timm with torch.compile and fused AdamW / ours, ViT-S, batch 256, bfloat16, RoPE-Mixed",
        "0.85",
        "1.1",
        "1.35",
        "",
    ),
    Goal(
        "T2",
        "bytes that a training step allocates, without rematerialisation: jnp rotation and cuDNN attention / ours, ViT-S, batch 256",
        "1.05",
        "1.15",
        "1.3",
        "",
    ),
    Goal("T3", "images/s of the input pipeline / of the training step, 16 cores", "0.5", "1.0", "1.5", ""),
    Goal("S1", "seconds to compile: layers unrolled / scanned, ViT-B training step, at most 3 % slower steps", "1.5", "3", "6", "12"),
    Goal("S2", "seconds to the first training step of a ViT-B: caches empty / warm, fresh processes", "3", "8", "20", ""),
    Goal("S3", "seconds to compile the sweep of 1,800 cases: naively / by canonical shapes", "2", "5", "10", ""),
)
