"""The text of compiled programs is parsed, and what they move is estimated from it."""

import jax
import jax.numpy as jnp
import pytest

from scripts.hlo_text import Program, nbytes, nbytes_off_chip

# The form of a TPU's program: tiled layouts, on-chip memory S(1), asynchronous copies, tables of lines.
TPU = """HloModule jit_f, is_scheduled=true

FileNames
1 "/somewhere/kvjax/ops/one.py"
2 "/somewhere/kvjax/two.py"

FunctionNames
1 "inner"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%turned (p.1: f32[8,128]) -> f32[128,8] {
  %p.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %transpose.1 = f32[128,8]{1,0:T(8,128)} transpose(%p.1), dimensions={1,0}
  ROOT %bitcast.1 = f32[128,8]{1,0:T(8,128)} bitcast(%transpose.1)
}

%taken (p.2: bf16[1000,128], p.3: s32[]) -> bf16[1,128] {
  %p.2 = bf16[1000,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.3 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %slice.1 = bf16[1,128]{1,0:T(2,128)(2,1)} dynamic-slice(%p.2, %p.3, %zero), dynamic_slice_sizes={1,128}
}

%put (p.4: bf16[1000,128], p.5: bf16[1,128], p.6: s32[]) -> bf16[1000,128] {
  %p.4 = bf16[1000,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.5 = bf16[1,128]{1,0:T(2,128)(2,1)} parameter(1)
  %p.6 = s32[]{:T(128)} parameter(2)
  %none = s32[]{:T(128)} constant(0)
  ROOT %update = bf16[1000,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%p.4, %p.5, %p.6, %none)
}

ENTRY %main.1 (x.1: f32[8,128], pool.1: bf16[1000,128], at.1: s32[]) -> (f32[128,8], bf16[1000,128]) {
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %pool.1 = bf16[1000,128]{1,0:T(8,128)(2,1)} parameter(1)
  %at.1 = s32[]{:T(128)} parameter(2)
  %copy-start.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x.1)
  %copy-done.1 = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %fusion.1 = f32[128,8]{1,0:T(8,128)} fusion(%copy-done.1), kind=kLoop, calls=%turned, metadata={op_name="jit(f)/transpose" stack_frame_id=2}
  %copy.1 = bf16[1000,128]{0,1:T(8,128)(2,1)} copy(%pool.1)
  %fusion.2 = bf16[1,128]{1,0:T(2,128)(2,1)} fusion(%copy.1, %at.1), kind=kLoop, calls=%taken, metadata={op_name="jit(f)/take" stack_frame_id=1}
  %kernel = f32[8,128]{1,0:T(8,128)} custom-call(%x.1), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"4321"}}
  %fusion.3 = bf16[1000,128]{1,0:T(8,128)(2,1)} fusion(%pool.1, %fusion.2, %at.1), kind=kLoop, calls=%put
  ROOT %tuple.1 = (f32[128,8]{1,0:T(8,128)}, bf16[1000,128]{1,0:T(8,128)(2,1)}) tuple(%fusion.1, %fusion.3)
}
"""  # noqa: E501


# A kernel by Triton in a GPU's program, which tells what each of its 2 x 15 programs accesses.
GPU = r"""ENTRY %main.1 (pool.1: u16[100000,128]) -> f32[8,15,4] {
  %pool.1 = u16[100000,128]{1,0} parameter(0)
  ROOT %kernel = f32[8,15,4]{2,1,0} custom-call(%pool.1), custom_call_target="__gpu$xla.gpu.triton", backend_config={debug = false, grid_x = 2 : i32, grid_y = 15 : i32, grid_z = 1 : i32, ir = "ML\EF", name = "_kernel", num_stages = 2 : i32, num_warps = 4 : i32, serialized_metadata = "{\22bytes_accessed_by_each\22: \2220912\22}"}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
    return Program(TPU)


@pytest.mark.parametrize("shape, size", [
    ("f32[8,128]{1,0:T(8,128)}", 4096), ("pred[]", 1), ("s4[3,5]{1,0}", 8), ("bf16[2,0,4]", 0),
    ("(u16[4]{0:T(128)S(1)}, /*index=1*/u8[3]{0}, token[])", 11), ("f8e4m3fn[16]", 16),
])
def test_bytes_of_a_type(shape, size):
    assert nbytes(shape) == size


def test_on_chip_arrays_are_left_out_of_what_is_off_the_chip():
    assert nbytes_off_chip("(f32[8]{0:T(128)S(1)}, f32[4]{0:T(128)})") == 16


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="unknown type"):
        nbytes("strange[4]")


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        Program("module @jit_f {}")


def test_inside_of_a_fusion_nothing_runs_by_itself(program):
    names = {instruction.name for _, instruction in program.running}
    assert {"fusion.1", "copy.1"} < names and not {"transpose.1", "update"} & names


def test_the_largest_copy_is_the_one_into_another_layout(program):
    copies = {instruction.name: size for size, _, instruction in program.copies()}
    assert copies == {"fusion.1": 4096, "copy.1": 256_000}  # not the prefetch, which keeps the layout
    assert program.largest_copy() == (256_000, "bf16[1000,128]{0,1:T(8,128)(2,1)}")


def test_slices_count_what_they_take_and_updates_what_they_write(program):
    moved = {instruction.name: size for size, instruction in program.costs() if size}
    assert moved == {
        "copy-start.1": 2 * 4096, "fusion.1": 2 * 4096, "copy.1": 2 * 256_000, "fusion.2": 2 * 256 + 4,
        "kernel": 4321, "fusion.3": 2 * 256 + 4,
    }


def test_a_kernel_of_a_gpu_counts_what_each_of_its_programs_tells():
    assert [size for size, each in Program(GPU).costs() if each.name == "kernel"] == [2 * 15 * 20912]


def test_launches_are_what_runs_by_itself_and_moves_something(program):
    """A copy of two parts once; no parameter, and nothing inside a fusion."""
    assert program.launches() == 6 and Program(GPU).launches() == 1


def test_what_is_on_the_chip_can_be_left_out(program):
    moved = {instruction.name: size for size, instruction in program.costs(nbytes_off_chip)}
    assert moved["copy-start.1"] == moved["fusion.1"] == 4096 and moved["copy.1"] == 512_000


def test_an_instruction_leads_to_the_lines_that_asked_for_it(program):
    instructions = program.computations[program.entry]
    calls = program.stack(instructions["fusion.1"])
    assert calls == [("/somewhere/kvjax/ops/one.py", 7), ("/somewhere/kvjax/two.py", 9)]
    assert program.reason(instructions["copy.1"]).name == "fusion.2"  # added for the one that takes its result
    assert program.reason(instructions["fusion.3"]).name == "fusion.2"  # no user was asked for: after its operand


def test_a_program_of_this_jax_is_understood():
    """On CPU: the transpose of a square matrix is found, with its size, and this file is among its lines."""
    def f(x, y):
        turned = jax.lax.optimization_barrier(x.T)
        return jax.lax.while_loop(lambda z: jnp.sum(z) < 0, lambda z: jnp.sin(z) @ y, turned)

    square = jax.ShapeDtypeStruct((96, 96), jnp.float32)
    parsed = Program(jax.jit(f).lower(square, square).compile().as_text())
    assert parsed.largest_copy()[0] == 96 * 96 * 4
    assert sum(size for size, _ in parsed.costs()) > 6 * 96 * 96 * 4  # the loop's body is counted, once
    found = [parsed.stack(instruction) for _, instruction in parsed.running]
    # A program that was kept on disk names the file that it was compiled from.
    assert any(name.endswith("test_hlo_text.py") for stack in found for name, _ in stack)


MESH = """
%sum (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a.1, %b.1)
}

%gathered (p.1: bf16[10,100,128], p.2: s32[]) -> bf16[1,128] {
  %p.1 = bf16[10,100,128]{2,1,0} parameter(0)
  %p.2 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %flat = bf16[1000,128]{1,0} bitcast(%p.1)
  ROOT %slice.1 = bf16[1,128]{1,0} dynamic-slice(%flat, %p.2, %zero), dynamic_slice_sizes={1,128}
}

ENTRY %main.1 (x.1: f32[1,4096], y.1: bf16[16], pool.1: bf16[10,100,128], at.1: s32[]) -> f32[1,4096] {
  %x.1 = f32[1,4096]{1,0} parameter(0)
  %y.1 = bf16[16]{0} parameter(1)
  %pool.1 = bf16[10,100,128]{2,1,0} parameter(2)
  %at.1 = s32[] parameter(3)
  %all-gather-start.1 = (bf16[16]{0}, bf16[64]{0}) all-gather-start(%y.1), dimensions={0}
  %all-gather-done.1 = bf16[64]{0} all-gather-done(%all-gather-start.1)
  %fusion.1 = bf16[1,128]{1,0} fusion(%pool.1, %at.1), kind=kLoop, calls=%gathered
  ROOT %all-reduce.1 = f32[1,4096]{1,0} all-reduce(%x.1), to_apply=%sum
}
"""


def test_what_devices_exchange_is_told_by_array():
    assert Program(MESH).exchanges() == [
        {"kind": "all-gather", "shape": "bf16[64]", "bytes": 128},
        {"kind": "all-reduce", "shape": "f32[1,4096]", "bytes": 16_384},
    ]


def test_a_slice_of_what_only_another_name_was_given_to_is_a_slice():
    moved = {instruction.name: size for size, instruction in Program(MESH).costs()}
    assert moved["fusion.1"] == 2 * 256 + 4
