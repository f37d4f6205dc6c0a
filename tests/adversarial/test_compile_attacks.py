"""Texts that read files while they are compiled, or share a name with another kernel: none gets past the first look."""

from __future__ import annotations

from pathlib import Path

import pytest
from rivals.carried_builds import CarriedBuilds

from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas_lab.custom.examples.example_kernels import all_examples
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import build, own_words
from outblas_lab.jail.static_gate import examine
from outblas_lab.jail.text_rules import refusal
from support.free_fixture import BODY, EXPLOITS, device_text, host_text, missing
from support.gpus.known import H200

P = Problem(64, 64, 64)
NEEDS_COMPILERS = pytest.mark.skipif(missing() is not None, reason=str(missing()))
QUOTE = "#define S_(x) #x\n#define S(x) S_(x)\n"
C, DOT = '#define X "c"\n', '#define F() "."\n'
#: What a scan takes for a comment that takes the quote before it for the beginning of a character.
HIDDEN = 'auto p = "\' /*"; asm(".incbin \\"/etc/passwd\\""); /* */'
READS = {
    "a character of .incbin by number": r'asm(".inc\u0062in \"/etc/passwd\"");',
    "eight digits": r'asm(".inc\U00000062in \"/etc/passwd\"");',
    "a character by braces": r'asm(".inc\u{62}in \"/etc/passwd\"");',
    "a character by name": r'asm(".inc\N{LATIN SMALL LETTER B}in \"/etc/passwd\"");',
    "the point is a quoted argument": QUOTE + r'asm(S(.) "incbin \"/etc/passwd\"");',
    "the word is a quoted argument": QUOTE + r'asm("." S(incbin) " \"/etc/passwd\"");',
    "the word is a quoted argument by digraphs": r'%:define S(x) %:x' + "\n" + r'asm("." S(incbin) " \"/x\"");',
    "a header quotes": r'asm(__STRING(.) "incbin \"/etc/passwd\"");',
    "a header quotes into a macro": '#define DOT __STRING(.)\n' + r'asm(DOT "incbin \"/etc/passwd\"");',
    "a macro writes the assembly": r'__asm__ volatile(ANY(x) "\"/etc/passwd\"");',
    "the word asm is pasted": QUOTE + r'#define J(a, b) a##b' + "\n" + r'J(as, m)(S(.) "incbin \"/x\"");',
    "an assembler's macro": r'asm(".macro z a,b\n.\\a\\b \"/etc/passwd\"\n.endm\nz inc,bin");',
    "an assembler's loop": r'asm(".irp w,incbin\n.\\w \"/etc/passwd\"\n.endr");',
    "a loop over characters": r'asm(".irpc w,b\n.inc\\w\\()in \"/etc/passwd\"\n.endr");',
    "a repetition": r'asm(".rept 1\n.endr");',
    "another syntax": r'asm(".mri 1\nincbin \"/etc/passwd\"");',
    "the word asm is pasted by a header": r'__CONCAT(as, m)(__STRING(.) "incbin \"/x\"");',
    "other macros": r'asm(".altmacro");',
    "a macro in two literals": r'asm(".mac" "ro z\n.endm");',
    "a directive by number": '#\\u0069nclude "/etc/passwd"',
    "a header that a macro names": '#define Q "/etc/passwd"\n#if __has_include Q\n#endif',
    "a question by a macro": '#define H __has_include\n#if H("/etc/passwd")\n#endif',
    "an embedded file by a macro": '#if __has_embed Q\n#endif',
    "a pragma as an operator": '_Pragma("GCC dependency \\"/etc/passwd\\"")',
    "a pragma as an operator of two words": '_Pragma ( "message \\"x\\"" )',
    "another spelling of it": "__pragma(message(\"x\"))",
    "lines of another file": '#line 1 "/etc/passwd"\n#warning x',
    "lines by a macro": '#define L 1 "/etc/passwd"\n#line L\n#warning x',
    "a marker of lines": '# 1 "/etc/passwd"\n#warning x',
    "a marker by a digraph": '%: 1 "/etc/passwd"\n#warning x',
    "a continued line": '#li\\\nne 1 "/etc/passwd"',
    "a compiled header": '#pragma GCC pch_preprocess "/etc/passwd"',
    "an alias": '#pragma include_alias("a.h", "/etc/passwd")',
    "a letter is a macro": C + r'asm(".in" X "bin \"/etc/passwd\"");',
    "a letter is a macro of macros": C + "#define Y X\n" + r'asm(".in" Y "bin \"/etc/passwd\"");',
    "one of two letters is": '#define X "z"\n' + C + r'asm(".in" X "bin \"/etc/passwd\"");',
    "the beginning is a macro": '#define X ".inc"\nauto y = "z";' + r'asm(X "bin \"/etc/passwd\"");',
    "asm has another name": DOT + r'#define A asm' + "\n" + r'auto y = "z"; A(F() "incbin \"/etc/passwd\"");',
    "asm is an argument": DOT + r'#define A(x, y) x(y)' + "\n" + r'A(asm, F() "z" "incbin \"/etc/passwd\"");',
    "the template is an argument": DOT + '#define A(x) asm(x)\n' + r'A(F() "z" "incbin \"/etc/passwd\"");',
    "a constant is the template": "asm((Q{}));",
    "a section": QUOTE + r'__attribute__((section("a\n" S(.) "incbin \"/etc/passwd\"\n#"))) int x;',
    "a section by a macro": C + r'[[gnu::section("a\n.in" X "bin \"/etc/passwd\"\n#")]] int x;',
    "an alias by a macro": C + r'extern int y __attribute__((alias("z\n.in" X "bin \"/etc/passwd\"")));',
    "a version by a macro": C + r'__attribute__((__symver__("z\n.in" X "bin \"/etc/passwd\""))) int y();',
    "a comment within a word": r'asm(".inc/**/bin \"/etc/passwd\"");',
    "many digits": r'asm(".inc\x00000062in \"/etc/passwd\"");',
    "digits in braces": r'asm(".inc\x{62}in \"/etc/passwd\"");',
    "eight in braces": r'asm(".inc\o{142}in \"/etc/passwd\"");',
    "a number from a point on": f"D(.5'0) {HIDDEN}",
    "a number with a sign": f"D(1e+'0) {HIDDEN}",
    "a number that ends in a point": f"D(1.'0) {HIDDEN}",
    "a raw literal of two lines": 'auto p = R"a( )\\\na" /* )a"; ' + r'asm(".incbin \"/etc/passwd\""); //*/',
    "a raw literal that is left out": f'{DOT}#if 0\nR"(\n#endif\nasm(F() "incbin ");\n#if 0\n)"\n#endif',
    "a line that goes on": 'auto p = "abc \\\f\n /* "; ' + r'asm(".incbin \"/etc/passwd\""); /* */',
    "a return alone": '// x \r ' + r'asm(".incbin \"/etc/passwd\"");',
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_text_that_reads_files_is_refused_before_a_compiler_sees_it(name: str) -> None:
    assert refusal(f"int x;\n{READS[name]}\n") is not None


def test_a_mark_of_the_byte_order_hides_no_directive() -> None:
    assert refusal('\ufeff#line 3 "/usr/lib/os-release"\n#warning x\n') is not None
    assert refusal("\ufeffint x;\n") is None


def test_macros_that_double_are_read_in_time() -> None:
    doubled = "".join(f"#define A{i + 1} A{i} A{i}\n" for i in range(200))
    assert refusal(f'#define A0 "x"\n#define B B "y"\n{doubled}asm(".in" A200 B "zcbin");') is None


def test_a_device_text_may_write_assembly_by_macros() -> None:
    text = '#define MMA(T) asm volatile("mma." T ".f32" :: "r"(0))\nMMA("f16");'
    assert refusal(text) is not None and refusal(text, host=False) is None


def test_honest_texts_are_let_through() -> None:
    texts = [kernel.text for kernel in all_examples().values()]
    texts += [path.read_text() for path in EXPLOITS.glob("honest_*.cu")]
    texts += [
        '_Pragma("unroll 4")',
        "#pragma unroll\n// a \\user",
        'printf("a\\\\user");',
        "#define A(x) x##x",
        "#error line",
    ]
    texts.append("auto x = 1'000'000 + 0x1'0; char c = '\"'; /* a */ asm(\"nop\");")
    texts.append('#define A asm_of(x)\nint section = 1, alias(2); __asm__ __volatile__("" ::: "memory");')
    texts.append('#define T "f16"\nasm volatile("mma." T ".f32" : "+f"(d[f(0)]) : "r"(a));')
    assert len(texts) > 15
    assert [refusal(text) for text in texts] == [None] * len(texts)


#: What compilers said here, with a key in the place of what they quoted.
SAID = {
    "host": "/home/u/.ssh/id:3:2: warning: #warning hello [-Wcpp]\n    3 | SECRET-LINE\n      |  ^~~~~~~\n",
    "host within": "In file included from kernel.cu:3:\n/usr/lib/x:1:1: error: 'SECRET' does not\n"
    "    1 | SECRET-LINE is here\n      | ^~~~~~\n    2 | SECRET-LINE\n",
    "device": 'x/y.h(45): error: no operator "<" matches\n            operand types are: Z < Z\n'
    "        { return SECRET-LINE; }\n                  ^\nx/y.h(46): note #1: candidate\n  SECRET-LINE\n  ^\n",
}


@pytest.mark.parametrize("name", SAID)
def test_a_log_quotes_no_line_of_another_file(name: str) -> None:
    own = "kernel.cu(4): error: bad\n  int own = ;\n            ^\n"
    found = own_words(SAID[name] + own, "int own = ;", 10_000)
    assert "SECRET-LINE" not in found and found.endswith(own)
    assert SAID[name].split("\n")[0] in found
    fake = "kernel.cu:1:1: error: kernel.cu(4): error: x\n    1 | SECRET-LINE\n  SECRET-LINE\n  ^\n"
    assert "SECRET-LINE" not in own_words(fake, "static_assert(false);", 10_000), "it only names the candidate's file"
    assert "operand types" in found or name != "device"


def test_a_log_is_clean_and_bounded() -> None:
    assert own_words("a\x1b]0;x\x07b\ud800\x9bc", "", 100) == "a]0;xb?c"
    assert len(own_words("x" * 500, "", 100)) == 100


@NEEDS_COMPILERS
def test_compilers_quote_the_candidate_and_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outblas_lab.jail import static_gate

    host = host_text("#include <cuda_fp16.h>\nint extra() { __half h; return h.mine + sizeof(__half2::theirs); }")
    found = examine(P, FreeKernel.parse(host), H200, cache=None)
    assert isinstance(found, Evaluation) and "return h.mine" in found.log
    monkeypatch.setattr(static_gate, "refusal", lambda *_: None)  # as if it got past the rules
    secret = Path("/usr/lib/os-release").resolve()
    if secret.exists():
        text = host_text(f'#line 3 "{secret}"\n#warning hello\n')
        logged = examine(P, FreeKernel.parse(text), H200, cache=None).log
        lines = [line.strip() for line in secret.read_text().splitlines() if len(line) > 8]
        assert "hello" in logged and not [line for line in lines if line in logged]


def body(text: str) -> str:
    return BODY.replace("float sum = 0.0f;", f"float sum = 0.0f;\n{text}")


HIDES = '{} auto p = "\' /*"; int x = {}; /* */'
LEFT_OUT = '#if 0\nR"(\n#endif\nint x;\n#if 0\n)" /* \n#endif\nint y = {};/* */\n'
#: Pairs of texts of which each is another kernel, though they differ in white space and comments alone.
TWINS = {
    "the line": ("\n\nint x = __LINE__;", "int x = __LINE__;"),
    "the line, asked otherwise": ("\n\nint x = __builtin_LINE();", "int x = __builtin_LINE();"),
    "the line in a condition": ("\n#if __LINE__ % 2\nint x = 1;\n#endif", "#if __LINE__ % 2\nint x = 1;\n#endif"),
    "a comment of two lines": ("/* a\n */ int x = __LINE__;", "/* a */ int x = __LINE__;"),
    "a quoted sum": ("int x = sizeof(S(a+b));", "int x = sizeof(S(a + b));"),
    "the place": ("\nauto x = source_location::current().line();", "auto x = source_location::current().line();"),
    "an assertion": ("\nassert(m > 0);", "assert(m > 0);"),
    "a name that is continued": ("\n\nint x = __LI\\\nNE__;", "int x = __LI\\\nNE__;"),
    "a name by number": ("\n\nint x = \\u005f_LINE__;", "int x = \\u005f_LINE__;"),
    "a pasted name": ("\n\nint x = J(__LI, NE__);", "int x = J(__LI, NE__);"),
    "a header's quotation": ("auto x = __STRING(a+b);", "auto x = __STRING(a + b);"),
    "a line that is set": ("\n#line 7\nint x;", "#line 7\nint x;"),
    "a name pasted without arguments": ("\n\nint x = L;", "int x = L;"),
    "a name pasted by a macro with a dollar": ("\n\nint x = $J(__LI, NE__);", "int x = $J(__LI, NE__);"),
    "a name pasted behind a form feed": ("\n\nint x = J(__LI, NE__);", "int x = J(__LI, NE__);"),
    "a name pasted by a header": ("\n\nint x = __CONCAT(__LI, NE__);", "int x = __CONCAT(__LI, NE__);"),
    "a number with a sign": (HIDES.format("D(1e+'0)", 1), HIDES.format("D(1e+'0)", 2)),
    "a dollar before a literal": tuple(f'auto p = $R"(" ")" /* \n"; int x = {i}; /* */' for i in (1, 2)),
    "a suffix with a dollar": ('int x = "+"$s;', 'int x = "+" $s;'),
    "a raw literal that is left out": tuple(LEFT_OUT.format(i) for i in (1, 2)),
    "a bracket": ("int y = x<:0:>;", "int y = x< : 0 : >;"),
}
MACROS = {
    "a quoted sum": "#define S(x) #x\n",
    "a pasted name": "#define J(a, b) a##b\n",
    "a name pasted without arguments": "#define L __LI##NE__\n",
    "a name pasted by a macro with a dollar": "#define $J(a, b) a##b\n",
    "a name pasted behind a form feed": "#define\fJ(a, b) a##b\n",
}


@pytest.mark.parametrize("name", TWINS)
def test_texts_that_say_where_they_stand_have_names_of_their_own(name: str) -> None:
    one, other = (FreeKernel.parse(device_text(MACROS.get(name, "") + body(text))) for text in TWINS[name])
    assert one.name != other.name and one != other


def test_other_texts_still_have_the_name_of_their_tokens() -> None:
    pairs = [
        ("int x  =  1; // one\n\n", "int x = 1;"),
        ("#define D(x)  (x + 1)\nint y;", "#define D(x) (x + 1)\nint y; /* two\nlines */"),
        ("static_assert(sizeof(int)   == 4);", "static_assert(sizeof(int) == 4);"),
        ("int x; // __LINE__ of", "int x; // __LINE__ of"),
    ]
    for one, other in pairs:
        assert FreeKernel.parse(device_text(body(one))).name == FreeKernel.parse(device_text(body(other))).name


@NEEDS_COMPILERS
def test_what_is_kept_of_one_text_does_not_answer_for_another(tmp_path: Path) -> None:
    write = "if (m == 12345) c[0] = __float2half((float)(__LINE__ * 1000));"
    one, other = (FreeKernel.parse(device_text(body(text))) for text in (f"\n{write}", write))
    built = [build(kernel, P, H200, cache=None) for kernel in (one, other)]
    assert built[0].cubin.image != built[1].cubin.image, "they are two kernels"
    carried = CarriedBuilds(tmp_path, H200)
    carried.put(built[0], P)
    assert carried.get(one, P) is not None and carried.get(other, P) is None
    same = [build(FreeKernel.parse(device_text(body(text))), P, H200, cache=None) for text in ("int x;\n\n", "int x;")]
    assert same[0].cubin.image == same[1].cubin.image, "equal names, equal kernels"


@NEEDS_COMPILERS
def test_a_recording_does_not_answer_for_a_text_that_was_never_measured(tmp_path: Path) -> None:
    from outblas.core.evaluation import Evaluation as Found
    from outblas_lab.jail.evaluation_file import Recorder, load
    from support.gpus.known import H200

    one, other = (FreeKernel.parse(device_text(body(text))) for text in TWINS["the line"])
    with Recorder(tmp_path / "r.jsonl", H200, {}) as recorder:
        recorder.append(Found(P, one, Status.COMPILE_ERROR, "measured"))
    recorded = load(tmp_path / "r.jsonl")
    assert recorded.find(P, one) is not None and recorded.find(P, other) is None
