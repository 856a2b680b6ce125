"""FLOPs of library calls on GPU, from their HLO text."""

import pytest

from jshard._verify.hlo_flops import cycles, flops
from jshard._verify.hlo_parser import parse


def instruction_flops(instruction: str) -> float:
    text = f"""
ENTRY %main (x: f32[2,8,8,3], k: f32[3,3,3,5], y: f32[2,8,8,5]) -> f32[1] {{
  %x = f32[2,8,8,3] parameter(0)
  %k = f32[3,3,3,5] parameter(1)
  %y = f32[2,8,8,5] parameter(2)
  %a = bf16[16,64,32] parameter(3)
  %b = bf16[16,32,8] parameter(4)
  ROOT %r = {instruction}
}}"""
    c = parse(text).computations["main"]
    return flops(c.root, c)


WINDOW = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
# Pairs of an output position and a kernel position inside the input: 3 * 8 - 2 in each of the two dimensions.
CONVOLUTION = 2 * 2 * 3 * 5 * 22 * 22


@pytest.mark.parametrize(
    "call",
    [
        f'(f32[2,8,8,5], u8[0]) custom-call(%x, %k), {WINDOW}, custom_call_target="__cudnn$convForward"',
        f'(f32[2,8,8,3], u8[0]) custom-call(%y, %k), {WINDOW}, custom_call_target="__cudnn$convBackwardInput"',
        f'(f32[3,3,3,5], u8[0]) custom-call(%x, %y), {WINDOW}, custom_call_target="__cudnn$convBackwardFilter"',
        f"f32[2,8,8,5] convolution(%x, %k), {WINDOW}",
    ],
)
def test_a_convolution_and_its_gradients_have_one_count(call: str) -> None:
    """cuDNN writes the window of the forward convolution on all three, with the arrays in other roles."""
    assert instruction_flops(call) == CONVOLUTION


def test_a_product_by_cublas_counts_its_contracted_dimension() -> None:
    config = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}'
    call = f'(bf16[16,64,8], s8[64]) custom-call(%a, %b), custom_call_target="__cublas$gemm", {config}'
    assert instruction_flops(call) == 2 * 16 * 64 * 32 * 8
    assert instruction_flops(call.replace("__cublas$gemm", "__onednn$matmul")) == 2 * 16 * 64 * 32 * 8


@pytest.mark.parametrize(
    "other",
    [
        'f32[2,8,8,5] custom-call(%x), custom_call_target="Sharding"',
        "f32[2,8,8,3] add(%x, %x)",
        'f32[16,64,8] custom-call(%a, %b), custom_call_target="__cublas$gemm"',  # without its dimensions
    ],
)
def test_other_calls_count_nothing(other: str) -> None:
    assert instruction_flops(other) == 0.0


def test_cycles_of_the_tpu_compiler() -> None:
    text = "ENTRY %m (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n  ROOT %n = f32[8] negate(%x)BACKEND\n}"
    for said, expected in ((', backend_config={"estimated_cycles":"1203"}', 1203.0), ("", 0.0)):
        root = parse(text.replace("BACKEND", said)).computations["m"].root
        assert root is not None and cycles(root) == expected
