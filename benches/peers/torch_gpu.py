#!/usr/bin/env python3
"""What PyTorch reaches on this GPU at the shapes of `learner bench kernels --device cuda`, as one JSON object: the peer that our
figures stand beside. Times are medians of events over RUNS launches after WARM_UPS, as ours are.
"""

import json
import statistics

import torch
import torch.nn.functional as F

RUNS, WARM_UPS = 20, 3
ROWS, WIDTH, PRODUCT, LENGTH, QUERY_HEADS, KEY_VALUE_HEADS, HEAD_DIM = 8192, 4096, 4096, 8192, 32, 8, 128


def microseconds(work):
    for _ in range(WARM_UPS):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(RUNS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(1000 * began.elapsed_time(ended))
    return statistics.median(times)


def normal(*shape, grad=False):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def main():
    torch.manual_seed(0)
    rows = []

    def row(name, shape, time, flops=None, moved=None):
        entry = {"kernel": name, "shape": shape, "microseconds": time}
        if flops:
            entry["tflops"] = flops / time / 1e6
        if moved:
            entry["gigabytes_per_second"] = moved / time / 1e3
        rows.append(entry)

    a, b = normal(ROWS, PRODUCT), normal(PRODUCT, PRODUCT)
    row("matmul", f"{ROWS} x {PRODUCT} x {PRODUCT}", microseconds(lambda: a @ b.T), flops=2 * ROWS * PRODUCT * PRODUCT)
    a = normal(PRODUCT, PRODUCT)
    row("matmul", f"{PRODUCT} x {PRODUCT} x {PRODUCT}", microseconds(lambda: a @ b.T), flops=2 * PRODUCT**3)

    query = normal(1, QUERY_HEADS, LENGTH, HEAD_DIM, grad=True)
    key, value = (normal(1, KEY_VALUE_HEADS, LENGTH, HEAD_DIM, grad=True) for _ in range(2))
    attend = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    pairs = LENGTH * (LENGTH + 1) / 2 * QUERY_HEADS
    shape = f"length {LENGTH}, {QUERY_HEADS} : {KEY_VALUE_HEADS} heads of {HEAD_DIM}, causal"
    with torch.no_grad():
        row("attention forward", shape, microseconds(attend), flops=4 * HEAD_DIM * pairs)
    output, gradient = attend(), normal(1, QUERY_HEADS, LENGTH, HEAD_DIM)
    backward = lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)
    row("attention backward (10 D per pair counted)", shape, microseconds(backward), flops=10 * HEAD_DIM * pairs)

    x, weight = normal(ROWS, WIDTH), normal(WIDTH)
    row("rms_norm", f"{ROWS} x {WIDTH}", microseconds(lambda: F.rms_norm(x, (WIDTH,), weight, 1e-6)), moved=4 * ROWS * WIDTH)
    target = torch.empty_like(x)
    row("copy", f"{ROWS} x {WIDTH}", microseconds(lambda: target.copy_(x)), moved=4 * ROWS * WIDTH)
    print(json.dumps({"peer": f"torch {torch.__version__}", "device": torch.cuda.get_device_name(), "kernels": rows}))


main()
