"""The reader of the TPU compiler's schedules, on a schedule written by hand; no TPU, no libtpu."""

import importlib.util

import pytest

from benchmarks.bundles import UNITS, parse_kernel
from benchmarks.tpu_aot import Case, Compiled, LibtpuMissingError, compile_cases

# A loop over sequences (0x2 .. 0x13, with all 4 delay slots) holds a block that may be skipped
# (0x4 .. 0xa) and a loop over keys (0xb .. 0xe), which holds a loop of copies (0xc .. 0xd); those
# two have fewer delay slots. The bundle at 0xb goes over two lines; 0x9 and 0x13 print no depth.
BUNDLES = """\
= control target key start
LB: loop body
PF: predicated region fallthrough
= control target key end

     0   :  { %6 = vsyncpa [#allocation5], 0  ;;  %s1_s0 = inlined_call_operand.hbm [shape: bf16] }
   0x1   :  { %s2 = smov 0 } /* Start region 9 :: End region 9 */
   0x2 LB: > { %s3 = sadd.s32 1, %s2 } /* Start region 80 :: Start region 36 */
   0x3   : > { %5 = sbr.rel (%p7_p1) target = $region39  ;;  %s4 = sadd.s32 (!%p7_p1), 1, %s3 }
   0x4   :  { %21 = vtrace 3087007744 /* TraceMeStart(partial_tile) [ */ } /* Start region 38 */
   0x5   : > { %v5 = vld [vmem:[%s3] sm:$0xff] }
   0x6   : > { %v6 = vmatmul.bf16 %v5 }
   0x7   : > { %v7 = vmatmul.bf16 %v5 }
   0x8   : > { %v8 = vmatmul.bf16 %v5 }
   0x9   :  {}
   0xa   :  { %22 = vtrace 3355443200 /* ] TraceMeEnd(partial_tile) */ } /* End region 38 */
   0xb LB: >> { %v9 = vmatmul.bf16 %v6  ;;  %10 = shalt.err (!%p8_p2) /* BoundsCheck 0
element_size_in_bytes: 2048 */ } /* Start/End empty region 39 :: Start region 70 */
   0xc LB: >>> { %s8 = sadd.s32 1, %s8 } /* Start region 51 */
   0xd   : >>> { %9 = sbr.rel (!%p1_p2) target = $region51 } /* End region 51 */
   0xe PF: >> { %11 = sbr.rel (!%p5_p3) target = $region70 } /* End region 70 */
   0xf PF: > { %12 = sbr.rel (!%p6_p4) target = $region80 }
  0x10   : > { %s9 = sadd.s32 1, %s2 }
  0x11   : > { %s10 = sadd.s32 1, %s2 }
  0x12   : > { %s11 = sadd.s32 1, %s2 }
  0x13   :  {} /* End region 80 */
  0x14   :  { %13 = sbr.rel (%p9_p5) target = $region4 }
  0x15   :  {} /* exit bundle: %decode.1 = custom-call(%x_ref.1) */
"""
# Slots of MXU, VLOAD:FILL and VSTORE:SPILL of each bundle; other units are idle.
FILLED = {0x6: (1, 0, 0), 0xB: (2, 1, 0), 0xC: (0, 1, 3), 0x13: (0, 0, 5), 0x14: (0, 9, 9)}


def utilization(bundles=22, units=UNITS):
    lines = ["== CAPACTIY:", ", ".join(units), "    2" * len(units), "== UTILIZATION:"]
    for index in range(bundles):
        mxu, fill, spill = FILLED.get(index, (0, 0, 0))
        lines.append(f"{mxu} 0 0 0 0 0 {fill} 0 {spill} 0")
    return "\n".join(lines) + "\n"


def parse(bundles=BUNDLES, slots=None):
    return parse_kernel("decode.1", bundles, utilization() if slots is None else slots)


def test_loops_end_after_their_branch_and_its_delay_slots():
    loops = [(loop.depth, loop.start, loop.end) for loop in parse().loops]
    assert loops == [(1, 0x2, 0x14), (2, 0xB, 0xF), (3, 0xC, 0xE)]


def test_units_and_spills_are_summed_per_loop():
    kernel = parse()
    assert kernel.whole.bundles == 22
    outer, keys, copies = kernel.loops
    assert [loop.units["MXU"] for loop in kernel.loops] == [3, 2, 0]
    assert (outer.spills, keys.spills, copies.spills) == (10, 5, 4)


def test_the_hot_loops_are_the_innermost_ones_with_products():
    outer, keys, copies = parse().loops
    assert parse().hot_loops() == (keys,)  # the copies in it use no MXU
    assert parse().around(copies) == keys
    assert parse().around(keys) == outer
    with pytest.raises(ValueError, match="no loop around that at 0x2"):
        parse().around(outer)


def test_of_several_hot_loops_the_largest_is_first():
    branch = "{ %40 = sbr.rel (!%p1_p2) target = $region52  ;;"
    text = BUNDLES.replace("0x5   : > {", "0x5 LB: >> {").replace(
        "sm:$0xff] }\n   0x6   : > {", "sm:$0xff] } /* Start region 52 */\n   0x6   : >> " + branch
    )
    loops = parse(text).hot_loops()
    assert [(loop.start, loop.end) for loop in loops] == [(0x5, 0xB), (0xB, 0xF)]


def test_a_kernel_without_products_has_no_hot_loop(monkeypatch):
    monkeypatch.setattr(f"{__name__}.FILLED", {})
    with pytest.raises(ValueError, match="none of its 3 loops computes"):
        parse().hot_loops()


def test_a_scope_counts_the_bundles_between_its_marks():
    kernel = parse()
    assert [(scope.name, scope.start, scope.end) for scope in kernel.scopes] == [
        ("partial_tile", 0x5, 0xA)
    ]
    assert kernel.in_scope("partial_tile", kernel.loops[0]) == kernel.scopes
    assert (kernel.scopes[0].bundles, kernel.scopes[0].units["MXU"]) == (5, 1)
    assert kernel.in_scope("partial_tile", kernel.loops[2]) == ()
    assert kernel.in_scope("other", kernel.loops[0]) == ()


def test_a_scope_in_itself_is_refused_before_it_is_counted_twice():
    more = "0x6   : > { %30 = vtrace 1 /* TraceMeStart(partial_tile) [ */  ;;"
    text = BUNDLES.replace("0x6   : > {", more)
    kernel = parse(text.replace("0x8   : > {", "0x8   : > { /* ] TraceMeEnd(partial_tile) */ ;;"))
    with pytest.raises(ValueError, match="scopes 'partial_tile' in one another"):
        kernel.in_scope("partial_tile", kernel.loops[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("   0x5   : > { %v5 = vld [vmem:[%s3] sm:$0xff] }\n", "", "bundle 0x6 follows 5 bundles"),
        ("sbr.rel (!%p5_p3) target = $region70", "sbr.abs (!%p5_p3)", "unknown branch at 0xe"),
        ("target = $region70", "target = $region7", "3 loop bodies, but 2 branches back"),
        ("] TraceMeEnd(partial_tile)", "] TraceMeEnd(other)", "scope 'other' ends at 0xa unopened"),
        ("TraceMeEnd(partial_tile)", "", r"scopes \[\('partial_tile', 5\)\] never end"),
    ],
)
def test_a_schedule_of_another_form_is_refused(old, new, message):
    assert old in BUNDLES
    with pytest.raises(ValueError, match=message):
        parse(BUNDLES.replace(old, new))


def test_utilization_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="22 bundles, utilization of 21"):
        parse(slots=utilization(bundles=21))
    with pytest.raises(ValueError, match=r"utilization of units .*'NEW'"):
        parse(slots=utilization(units=(*UNITS[:-1], "NEW")))
    with pytest.raises(ValueError, match="0 bundles"):
        parse(bundles="")


def test_a_kernel_is_found_by_its_whole_name():
    compiled = Compiled(case="a", target="v6e", kernels=(parse(),))
    assert compiled.kernel("decode") == parse()
    with pytest.raises(ValueError, match=r"0 kernels named 'dec' in \['decode.1'\]"):
        compiled.kernel("dec")
    with pytest.raises(ValueError, match="'a' did not compile for v6e: too large"):
        Compiled(case="a", target="v6e", error="too large").kernel("decode")


def test_wrong_targets_and_cases_are_refused():
    case = Case("one", "somewhere:build")
    with pytest.raises(ValueError, match="target='v9': the targets are v5e, v5p, v6e, tpu7x"):
        compile_cases("v9", [case])
    with pytest.raises(ValueError, match="two cases have the same name"):
        compile_cases("v6e", [case, case])


def test_without_libtpu_it_says_how_to_install_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name)
    )
    with pytest.raises(LibtpuMissingError, match="pip install libtpu"):
        compile_cases("v6e", [Case("one", "somewhere:build")])
