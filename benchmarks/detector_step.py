"""What the paper's caches cost a detector: an update of Mask R-CNN or RetinaNet on PVT-Tiny at 800 × 1333 pixels.

    python benchmarks/detector_step.py [--detectors mask-rcnn retinanet] [--rounds 3] [--side 800] [--out FILE]

For each detector the recipes coco-DETECTOR-pvt-tiny and -cached, with new weights, one picture of noise and eight
objects. An update is forward, backward and AdamW. Each model has a process of its own with one thread; after a first
update, which is not timed, they take turns. A time is CPU time of the process, a ratio cached / uncached of the same
round: median, smallest and largest.

peak: the growth of the process's resident memory since before the model was built. kept: bytes of different tensors
that a forward keeps for the backward. FLOPs: products, convolutions and attention of forward and backward, counted.
If arithmetic decided alone, the times would have the ratio of the FLOPs. The second stage of Mask R-CNN reads the
boxes that it samples, which differ between the two models, so their FLOPs differ there too.
"""

import multiprocessing
import resource
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from command import command, write

from mnemos import registry
from mnemos.lab.measure.flops import count_flops

OBJECTS, ENDINGS = 8, ("", "-cached")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def picture(side: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A picture [3, side, 5/3·side] of noise, and boxes with masks of all sizes in it."""
    generator = torch.Generator().manual_seed(0)
    height, width = side, side * 5 // 3
    sizes = torch.linspace(0.05, 0.6, OBJECTS) * side
    corners = torch.rand(OBJECTS, 2, generator=generator) * (torch.tensor([width, height]) - sizes[:, None])
    boxes = torch.cat([corners, corners + sizes[:, None]], 1)
    masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y0:y1, x0:x1] = 1
    labels = torch.randint(1, 81, (OBJECTS,), generator=generator)
    return [torch.rand(3, height, width, generator=generator)], [{"boxes": boxes, "labels": labels, "masks": masks}]


def serve(recipe: str, side: int, orders: Connection) -> None:
    """A process with one model: "update" is answered with its seconds, "count" with {"peak", "kept", "flops"}."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, targets = picture(side)
    before = peak_bytes()
    config: Any = replace(registry.load("recipe", recipe)().model, classes=80, sides=(side,), longest=2 * side)
    model = config.build().train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4, fused=True)

    def gradients() -> None:
        torch.manual_seed(1)  # the same boxes are sampled
        sum(model(images, targets).values()).backward()

    while (order := orders.recv()) != "end":
        if order == "update":
            start = time.process_time()
            gradients()
            optimiser.step()
            optimiser.zero_grad()
            orders.send(time.process_time() - start)
            continue
        found: dict[str, float] = {"peak": peak_bytes() - before, "flops": count_flops(gradients)}
        optimiser.zero_grad()
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            losses = model(images, targets)
        found["kept"] = sum(size for place, size in kept.items() if place not in weights)
        del losses
        orders.send(found)


def compared(detector: str, side: int, rounds: int) -> dict[str, Any]:
    """Times and memory of the two recipes of a detector."""
    context, ends, processes = multiprocessing.get_context("spawn"), {}, []
    for ending in ENDINGS:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(f"coco-{detector}-pvt-tiny{ending}", side, there), daemon=True)
        process.start()
        ends[ending] = here
        processes.append(process)

    def asked(ending: str, order: str) -> Any:
        ends[ending].send(order)
        return ends[ending].recv()

    seconds: dict[str, list[float]] = {ending: [] for ending in ENDINGS}
    for i in range(rounds + 1):
        for ending in ENDINGS[:: 1 if i % 2 else -1]:
            found = asked(ending, "update")
            if i:
                seconds[ending].append(found)
    row: dict[str, Any] = {}
    for ending in ENDINGS:
        row[f"{detector}{ending}"] = {"seconds": statistics.median(seconds[ending]), **asked(ending, "count")}
        ends[ending].send("end")
    for process in processes:
        process.join()
    plain, cached = row.values()
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    row["ratio"] = {name: cached[name] / plain[name] for name in ("peak", "kept", "flops")}
    row["ratio"] |= {"seconds": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
    return row


def main() -> None:
    parser = command(
        __doc__, choices={"detectors": ["mask-rcnn", "retinanet"]}, detectors=["mask-rcnn", "retinanet"], rounds=3
    )
    parser.add_argument("--side", type=int, default=800, help="the shorter side; the longer one is 5/3 of it")
    options = parser.parse_args()
    rows = {}
    for detector in options.detectors:
        row = rows[detector] = compared(detector, options.side, options.rounds)
        for name, found in row.items():
            if name == "ratio":
                low, high = found["range"]
                print(
                    f"{detector}, cached / uncached: time {found['seconds']:.3f} ({low:.3f} to {high:.3f}), FLOPs "
                    f"{found['flops']:.3f}, kept {found['kept']:.3f}, peak {found['peak']:.3f}",
                    flush=True,
                )
            else:
                print(
                    f"{name:20} {found['seconds']:7.2f} s  {found['flops'] / 1e9:7.1f} GFLOPs  kept "
                    f"{found['kept'] / 2**20:7.0f} MiB  peak {found['peak'] / 2**20:7.0f} MiB",
                    flush=True,
                )
    settings = {"rounds": options.rounds, "side": options.side, "objects": OBJECTS, "threads": 1, "clock": "cpu"}
    write(options.out, {**settings, "rows": rows})


if __name__ == "__main__":
    main()
