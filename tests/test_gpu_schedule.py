"""The reader of the GPU compiler's files and the rules of its table, on files written by hand."""

from dataclasses import replace

import pytest

from benchmarks.gpu_aot import _largest_copy, compile_cases
from benchmarks.gpu_schedule import Result, differences
from benchmarks.gpu_shapes import ROWS
from benchmarks.sass import Kernel, parse_kernel, read_kernels
from benchmarks.tpu_aot import Case

LOG = """\
ptxas warning : Registers are spilled to local memory in function 'k', 8 bytes spill stores
ptxas info    : Function properties for k
    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size
"""
CODE = """\
        .size           k,(.L_x_129 - k)
   -:-:1:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
.L_x_91:
   1:-:-:Y:01        /*0010*/               @P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8]
   1:-:-:Y:01        /*0020*/              @!UP5 UTMALDG.2D [UR16], [UR4]
   -:-:-:Y:01        /*10030*/                  HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8]
   -:-:-:Y:01        /*10040*/                  STL [R1+0x4], R0
"""
MODULE = "%9 = gpu.launch async [%3] blocks(%a) dynamic_shared_memory_size %c182352_i32 {"


def test_a_kernel_is_read():
    kernel = parse_kernel("k", LOG, CODE, MODULE)
    assert (kernel.registers, kernel.spill_bytes, kernel.smem_bytes) == (168, 20, 182352)
    assert kernel.instructions == 5
    assert kernel.count("HGMMA") == 2
    assert kernel.count("LDL", "STL") == 1
    assert kernel.losses == 0


def test_a_warning_of_the_assembler_is_counted():
    warned = LOG + "ptxas info : (C7510) Potential Performance Loss: wgmma are serialized\n"
    assert parse_kernel("k", warned, CODE, MODULE).losses == 1


@pytest.mark.parametrize(("log", "code", "module"), [("", CODE, MODULE), (LOG, "", MODULE)])
def test_a_file_that_says_nothing_is_an_error(log, code, module):
    with pytest.raises(ValueError, match="'k': cannot read"):
        parse_kernel("k", log, code, module)


def test_modules_are_matched_unless_kernels_were_merged(tmp_path):
    for stem in ("k_2", "k_10"):
        (tmp_path / f"{stem}.ptxas").write_text(LOG.replace("168", stem[2:]))
        (tmp_path / f"{stem}.sass_ctrl").write_text(CODE)
        (tmp_path / f"{stem}.before_layout_inference.txt").write_text(MODULE)
    kernels = read_kernels(tmp_path)
    assert [(each.name, each.registers) for each in kernels] == [("k", 2), ("k", 10)]
    assert all(each.smem_bytes == 182352 for each in kernels)
    (tmp_path / "k_11.before_layout_inference.txt").write_text(MODULE)
    assert all(each.smem_bytes is None for each in read_kernels(tmp_path))


def test_the_largest_copy_is_found_in_the_entry_alone():
    program = (
        "%branch { %c = f32[1024,1024]{1,0} copy(%a) }\n"
        "ENTRY %main {\n  %c.1 = bf16[8,16]{1,0} copy(%b)\n"
        "  %c.2 = (s8[100]{0}, s8[100]{0}, u32[]) copy-start(%d)\n  %e = pred[] copy(%f)\n}"
    )
    assert _largest_copy(program) == 256


def kept(**changes):
    kernel = {"registers": 168, "instructions": 1000, "smem_bytes": 2000, "opcodes": {"HGMMA": 4}}
    program = {"ours": {"jaxattn_decode": 1}, "launches": 30, "temp_bytes": 100, "peak_bytes": 900}
    return program | {"kernels": {"jaxattn_decode": kernel | changes}}


def test_differences_within_the_tolerance_pass():
    near = kept(registers=176, instructions=1090, opcodes={"HGMMA": 5})
    assert differences(kept(), near) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"registers": 177}, "jaxattn_decode: registers 168 -> 177"),
        ({"instructions": 1200}, "jaxattn_decode: instructions 1,000 -> 1,200"),
        ({"opcodes": {"HMMA": 4}}, "jaxattn_decode: HGMMA disappeared"),
    ],
)
def test_differences_beyond_it_are_told(changes, expected):
    assert expected in differences(kept(), kept(**changes))


def test_broken_rules_are_told():
    good = Kernel(
        name="jaxattn_decode",
        registers=240,
        spill_bytes=0,
        smem_bytes=1,
        instructions=9,
        losses=0,
        opcodes={"HGMMA": 1, "UTMALDG": 1, "UTMASTG": 1},
    )
    result = Result(ROWS[0], None)
    assert result._kernel_faults(good) == []
    bad = replace(good, spill_bytes=4, losses=1, smem_bytes=2**18, opcodes={"HMMA": 2})
    text = "; ".join(result._kernel_faults(bad))
    for words in ("no HGMMA", "no UTMALDG", "HMMA 2", "4 bytes spilled", "losses", "262,144 bytes"):
        assert words in text


def test_cases_and_targets_are_checked():
    case = Case("one", "module:function")
    with pytest.raises(ValueError, match="h100"):
        compile_cases("t4", [case])
    with pytest.raises(ValueError, match="same name"):
        compile_cases("h100", [case, case])
