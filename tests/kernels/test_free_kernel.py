"""The contract of free kernels: valid texts, reasons for refusal, and names that do not depend on spelling."""

from __future__ import annotations

import json
import pickle

import pytest

from outblas.core.config import config_name, config_to_json
from outblas.core.errors import ContractError, OutblasError
from outblas.core.evaluation import LOG_BYTES, Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json
from outblas.records.store import Store
from outblas_lab.custom.contract import MAX_WORKSPACE_BYTES
from outblas_lab.custom.cuda_text import canonical, comments, split_text
from outblas_lab.custom.expression import Expression, variables_of
from outblas_lab.custom.free_kernel import MAX_TEXT_BYTES, FreeKernel, normalised
from support.free_fixture import BODY, block, device_text, host_text
from support.gpus.known import H200

P = Problem(128, 256, 512)


def parse(text):
    return FreeKernel.parse(text)


def test_a_launch_block_is_read_with_its_defaults():
    launch = parse(device_text(shared=1024, requires=["K % 64 == 0"], workspace="4 * M * N")).launch
    assert (launch.form, launch.entry, launch.acc, launch.shared) == ("device", "gemm", "fp32", 1024)
    assert launch.cluster == (1, 1, 1) and launch.tensor_maps == () and launch.uses == ()
    assert launch.grid_of(P, H200) == (16, 8, 1)
    assert launch.workspace_of(P, H200) == 4 * 128 * 256


def test_the_host_form_needs_no_grid():
    launch = parse(host_text("", uses=["cutlass"])).launch
    assert (launch.form, launch.entry, launch.uses) == ("host", "outblas_launch", ("cutlass",))
    assert launch.why_not(P, H200) is None


def test_tensor_maps_name_an_operand_a_box_and_a_swizzle():
    maps = [{"operand": "A", "box": [128, 64], "swizzle": 128}, {"operand": "B", "box": [64, 8]}]
    a, b = parse(device_text(tensor_maps=maps)).launch.tensor_maps
    assert (a.operand, a.box, a.swizzle, b.swizzle) == ("A", (128, 64), 128, 0)
    assert b.extents(Problem(8, 16, 32)) == (16, 32) and b.extents(Problem(8, 16, 32, "NN")) == (32, 16)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "empty"),
        ("int x;", "0 launch blocks"),
        (device_text() + block(form="host", acc="fp32"), "2 launch blocks"),
        ("/* outblas-launch {form: device} */", "not JSON"),
        ('/* outblas-launch {"form": "host", "form": "host", "acc": "fp32"} */', "twice"),
        ('/* outblas-launch {"form": "device", "shared": NaN} */', "not JSON"),
        ("/* outblas-launch [1] */", "no valid form"),
        (block(form="module", acc="fp32"), "no valid form"),
        (block(form="host", acc="fp8"), "acc"),
        (block(form="host", acc="fp32", uses=["thrust"]), "uses"),
        (block(form="host", acc="fp32", grid=[1, 1, 1]), "grid"),
        (device_text(entry="gemm; int x"), "entry"),
        (device_text(grid=["M", "N"]), "grid"),
        (device_text(grid=["M", "__import__('os')", 1]), "function '__import__'"),
        (device_text(grid=["M", "N / 2", 1]), "write //"),
        (device_text(grid=["M", "2 ** 64", 1]), "Pow"),
        (device_text(grid=["M", "X", 1]), "name 'X'"),
        (device_text(grid=["M", "ceil(N)", 1]), "ceil with 1"),
        (device_text(grid=["M", "N.real", 1]), "Attribute"),
        (device_text(grid=["M", "1.5", 1]), "1.5"),
        (device_text(grid=["M", "M+" * 200 + "M", 1]), "characters"),
        (device_text(grid=["M", "", 1]), "size ''"),
        (device_text(block=[1024, 2, 1]), "block"),
        (device_text(block=[True, 1, 1]), "block"),
        (device_text(cluster=[16, 2, 1]), "cluster"),
        (device_text(shared=10**9), "shared"),
        (device_text(shared="1024"), "shared"),
        (device_text(tensor_maps=[{"operand": "D", "box": [8, 8]}]), "operand"),
        (device_text(tensor_maps=[{"operand": "A", "box": [8, 5]}]), "box"),
        (device_text(tensor_maps=[{"operand": "A", "box": [8, 128], "swizzle": 128}]), "swizzle"),
        (device_text(tensor_maps=[{"operand": "A", "box": [8, 64], "swizzle": 48}]), "swizzle"),
        (device_text() + "\0", "NUL"),
        (device_text() + "\ud800", "surrogate"),
        (device_text() + " " * MAX_TEXT_BYTES, "bytes"),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_refused_in_one_clear_line(text, wrong):
    with pytest.raises(ContractError) as caught:
        parse(text)
    assert wrong in str(caught.value) or wrong in caught.value.wrong
    assert isinstance(caught.value, OutblasError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "problem", "reason"),
    [
        ({"acc": "fp16"}, P, "accumulates in fp16"),
        ({"requires": ["K % 64 == 0"]}, Problem(8, 8, 65), "it requires K % 64 == 0"),
        ({"requires": ["M // (N - 8) > 0"]}, Problem(8, 8, 8), "divides by zero"),
        ({"grid": ["M - 8", 1, 1]}, Problem(8, 8, 8), "grid of (0, 1, 1)"),
        ({"grid": [1, "M * N", 1]}, Problem(512, 512, 8), "grid of"),
        ({"grid": [3, 1, 1], "cluster": [2, 1, 1]}, P, "not a multiple of cluster"),
        ({"workspace": "M * N * K * 4"}, Problem(1024, 1024, 1024), "workspace"),
        ({"workspace": MAX_WORKSPACE_BYTES + 1}, P, "workspace"),
        ({"tensor_maps": [{"operand": "A", "box": [8, 8]}]}, Problem(8, 8, 12), "TMA"),
    ],
)
def test_a_problem_that_a_kernel_does_not_take_is_told_why(keys, problem, reason):
    assert reason in (parse(device_text(**keys)).launch.why_not(problem, H200) or "")


def test_expressions_are_integers_of_the_extents():
    names = variables_of(100, 7, 9, 132)
    for text, value in {
        "ceil(M, 64)": 2, "M // 64 * 2 - 1": 1, "min(M, N, K)": 7, "max(M, SMS)": 132, "M % 64 == 36": 1,
        "1 < N < K": 1, "N > K or M == 100": 1, "not N": 0, "-N": -7, "M % 2 == 0 and K % 2 == 0": 0,
    }.items():  # fmt: skip
        assert Expression.parse(text).value(names) == value, text
    assert Expression.parse(" ceil( M,64 )") == Expression.parse("ceil(M, 64)")
    with pytest.raises(ContractError, match="2\\*\\*62"):
        Expression.parse("M * M * M * M * M * M * M * M * M * M").value(names)


@pytest.mark.parametrize(
    "other",
    [
        BODY.replace("  ", "\t"),
        BODY.replace("sum = 0.0f", 'sum=0.0f // a comment with a " in it\n'),
        BODY.replace("float sum", "float /* not outblas-launch */ sum"),
        BODY.replace("\n", "\r\n"),
        BODY.replace("return;", "return\n\n;"),
        BODY.replace("#include <cuda_fp16.h>", "  #  include  <cuda_fp16.h>  // half"),
        BODY.replace("blockIdx.x * 16", "blockIdx.x*\\\n16"),
    ],
)
def test_equal_kernels_have_equal_names_however_they_are_spelt(other):
    assert parse(device_text(other)) == parse(device_text())


@pytest.mark.parametrize(
    "other",
    [
        BODY.replace("0.0f", "0.0"),
        BODY.replace("++i", "i++"),
        BODY.replace("int k, void*", "int k, void *x"),
        BODY.replace("#include <cuda_fp16.h>", "#include <cuda_fp16.h>\n#define f(x) x"),
        BODY + 'constexpr char text[] = "a  b";',
        BODY.replace("return;", "return\u00a0;"),
        BODY + "// x \\ \nint y;",  # NVRTC takes the second line for code, g++ for a comment
        BODY + "// x \rint y;",  # nvcc takes that for code, NVRTC for a comment
        BODY + 'constexpr int size = sizeof(R"(a\\\nb)");',
        BODY + "#if 0\n.5'0 'x/*'\n#endif\nint y;\n// */",
    ],
)
def test_other_kernels_have_other_names(other):
    assert parse(device_text(other)).name != parse(device_text()).name
    assert len({parse(device_text(other)), parse(device_text())}) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("// x \\ \nint y;", "// x \\ \nint z;"),
        ("// x \rint y;", "// x \rint z;"),
        ('const char* s = R"(a\\\nb)";', 'const char* s = R"(ab)";'),
        ("#if 0\n.5'0 'x/*'\n#endif\nint y;\n// */", "#if 0\n.5'0 'x/*'\n#endif\nint z;\n// */"),
        ('const char* s = "a"R"(";\nint y;\n//)"', 'const char* s = "a"R"(";\nint z;\n//)"'),
        ("%:define X 1\nint y;", "%:define X 1 int y;"),
        ("x?\\\n?/\ny", "x?\\\n?/\n y"),
    ],
)
def test_what_compilers_read_in_two_ways_makes_two_names(one, other):
    assert parse(device_text(BODY + one)).name != parse(device_text(BODY + other)).name


def test_the_block_is_part_of_the_name_in_canonical_form():
    spelt = device_text().replace('"form"', '\n "form" ').replace("ceil(N, 16)", "ceil( N,16 )")
    assert parse(spelt) == parse(device_text()) == parse(device_text(cluster=[1, 1, 1], shared=0, workspace="0"))
    assert parse(device_text(shared=16)) != parse(device_text())
    assert json.loads(normalised(device_text()).splitlines()[0].removeprefix("/* outblas-launch").removesuffix("*/"))


def test_a_scan_loses_nothing_and_sees_no_comment_in_a_literal():
    text = 'a = "/* no */ // no"; R"x(/* no )" */)x"; \'"\'; 1\'000; /* yes */ b; // yes\n#define F(x) "\\"" \\\n  x'
    assert "".join(p.text for p in split_text(text)) == text
    assert comments(text) == [" yes "]
    assert canonical("#define F(x) x") != canonical("#define F (x) x")
    assert canonical("a + +b") != canonical("a ++ b")
    assert canonical('#define S "a  b"') != canonical('#define S "a b"')
    assert canonical('f(u8"x")') != canonical('f(u8 "x")') and canonical('"x"_s') != canonical('"x" _s')
    assert canonical("#  define   S  /* c */  1") == canonical("#define S 1") != canonical("# defineS 1")
    assert canonical('"unclosed') and canonical("/* unclosed") == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/* open", [" open"]),
        ("/* a */ b /* open *", [" a ", " open *"]),
        ("/*/", ["/"]),
        ("/*", [""]),
        ("/**/", [""]),
        ("/***/", ["*"]),
    ],
)
def test_an_unclosed_comment_is_whole(text, found):
    assert comments(text) == found


def test_a_block_in_a_literal_or_a_line_comment_is_none():
    hidden = 'const char* s = "' + block(form="host", acc="fp32").strip().replace('"', '\\"') + '";'
    assert parse(device_text() + hidden).launch.form == "device"
    with pytest.raises(ContractError):
        parse("// outblas-launch {}\n" + BODY)


def test_a_free_kernel_is_a_candidate_like_any_other(tmp_path):
    kernel = parse(device_text())
    assert config_name(kernel) == kernel.name and kernel.name.startswith("free_") and len(kernel.name) == 21
    assert config_from_json(config_to_json(kernel)) == kernel
    assert pickle.loads(pickle.dumps(kernel)) == kernel
    with pytest.raises(ContractError):
        config_from_json({"family": "free", "text": "int x;"})
    evaluation = Evaluation(P, kernel, Status.WRONG, "error 3 times the bound", counters={"hmma": 1.0}, log="words")
    with Store(tmp_path / "s.sqlite") as store:
        store.append("run", evaluation)
        store.append("run", Evaluation(P, Sm90WgmmaConfig(64, 64), Status.WRONG))
        assert store.recorded_pairs("run") == {(P.key, kernel.name), (P.key, config_name(Sm90WgmmaConfig(64, 64)))}
        assert store.recorded("run", P)[kernel] == evaluation
    with pytest.raises(OutblasError, match="template"):
        _ = evaluation.template


def test_a_log_is_kept_at_both_ends_and_left_out_where_there_is_none():
    kernel = parse(device_text())
    long = "first error\n" + "é" * LOG_BYTES + "\nlast word"
    kept = Evaluation(P, kernel, Status.COMPILE_ERROR, log=long).log
    assert len(kept.encode()) <= LOG_BYTES and kept.startswith("first error") and kept.endswith("last word")
    assert "log" not in evaluation_to_json(Evaluation(P, Sm90WgmmaConfig(64, 64), Status.WRONG))
    assert evaluation_from_json(evaluation_to_json(Evaluation(P, kernel, Status.WRONG, log="x"))).log == "x"
