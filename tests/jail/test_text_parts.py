"""Words of texts: those of compilers, literals side by side, names of symbols, and rules with a length."""

from __future__ import annotations

import pytest

from outblas_lab.jail.build import own_words
from outblas_lab.jail.static_gate import allowed, why_refused
from outblas_lab.jail.text_rules import can_say, literal_macros, refusal, runs_of


def plain(literal):
    return literal.strip('"')


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("a.cu(1): error\n1 | int x;\n2 | root:x:0", "a.cu(1): error\n1 | int x;"),
        ("   |  int x;  \n 12 |   ^~~", "   |  int x;  \n 12 |   ^~~"),
        ("12 | int x\n | ~~", ""),
        ("int x;\n    ^\nroot:x:0\n ~~^~\nend", "int x;\n    ^\nend"),
        ("  ^\nroot:x:0", "  ^\nroot:x:0"),
        ("root:x:0\n ~~ ^ words", "root:x:0\n ~~ ^ words"),
        ("\x1b[1mint x;\r\n ^", ""),
    ],
)
def test_lines_that_are_quoted_from_elsewhere_are_left_out(said, kept):
    assert own_words(said, "int x;\n  int y;\n", 1000) == kept


def test_so_many_letters_of_a_compiler_are_read():
    assert own_words("abcdef", "", 4) == "abcd" and own_words("a\n^ x", "", 3) == ""


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ('"ab" X "c", "d"', [[(True, "ab"), (False, "X"), (True, "c")], [(True, "d")]]),
        ("", []),
        ("; ;", []),
        ("X", [[(False, "X")]]),
        ("(X)", [[(False, "X")]]),
        ('X;"a"', [[(False, "X")], [(True, "a")]]),
        ('"a"/* c */"b"\n"c"', [[(True, "a"), (True, "b"), (True, "c")]]),
        ("A B", [[(False, "A"), (False, "B")]]),
        ("A,B", [[(False, "A")], [(False, "B")]]),
        ("$x1 2y", [[(False, "$x1")], [(False, "y")]]),
    ],
)
def test_runs_are_what_lies_side_by_side(text, runs):
    assert runs_of(text, plain) == runs


@pytest.mark.parametrize(
    ("lines", "macros"),
    [
        (['#define X "in"'], {"X": [[(True, "in")]]}),
        (['#define X "a"', '#define X "b"'], {"X": [[(True, "a")], [(True, "b")]]}),
        (["#define X"], {"X": []}),
        (['#define X "a", "b"'], {}),
        (['#define X "a", "b"', '#define X "c"'], {}),
        (['#define F(x) "a"'], {}),
        (['%: define $y Z "a"'], {"$y": [[(False, "Z"), (True, "a")]]}),
        (['#define X Y', '#define Z "a" ; "b"', "#undef X"], {"X": [[(False, "Y")]]}),
    ],
)  # fmt: skip
def test_macros_of_one_run_are_known_by_all_of_their_texts(lines, macros):
    assert literal_macros(lines, plain) == macros


@pytest.mark.parametrize(
    ("word", "text", "macros", "says"),
    [
        ("abc", '"abc"', {}, True),
        ("abc", '"xABCx"', {}, True),
        ("abc", '"ab" "c"', {}, True),
        ("abc", '"ab", "c"', {}, False),
        ("abc", '"ab" "xc"', {}, False),
        ("abc", '"aab" "c"', {}, True),
        ("aab", '"aa" "ab"', {}, True),
        ("aabaac", '"aabaa" "baac"', {}, True),
        ("abc", '"ab" X "c"', {}, True),  # an unknown name may be empty
        ("abc", '"ab" X "xc"', {}, False),
        ("abc", '"ab" X "abc"', {}, True),
        ("abc", '"a" X', {"X": [[(True, "BC")]]}, True),
        ("abc", '"a" X "c"', {"X": [[(True, "q")], [(True, "b")]]}, True),
        ("abc", '"a" X "c"', {"X": [[(True, "q")]]}, False),
        ("abc", '"ab" X "c"', {"X": [[(True, "q")]]}, True),  # X may be empty, too
        ("abc", '"a" X', {"X": [[(False, "Y"), (True, "c")]], "Y": [[(True, "b")]]}, True),
        ("abc", "X", {"X": [[(True, "a"), (False, "X"), (True, "bc")]]}, True),
        ("abcd", "X X", {"X": [[(True, "ab")], [(True, "cd")]]}, True),
        ("abcd", "X", {"X": [[(True, "ab")], [(True, "cd")]]}, False),
        ("abc", "", {}, False),
    ],
)
def test_a_run_can_say_what_its_literals_and_macros_spell(word, text, macros, says):
    assert can_say(word, runs_of(text, plain), macros) is says


@pytest.mark.parametrize(
    ("asked", "offered", "words"),
    [
        (["system"], ["outblas_launch"], "it calls system, which a launch does not need"),
        (["f", "e", "d", "c", "b", "a", "a", "malloc"], ["outblas_launch"],
         "it calls a, b, c, d, e, which a launch does not need"),
        (["system@GLIBC_2.2.5"], ["outblas_launch"], "it calls system, which a launch does not need"),
        ([], ["outblas_launch", "outblas_workspace", "curve", "cu", "mydlopen", "pthread"], None),
        ([], ["outblas_launch", "dlopen"], "it defines dlopen, which would replace real functions"),
        ([], ["cuX6", "cuX5", "outblas_launch", "cuX4", "cuX3", "cuX2", "cuX1"],
         "it defines cuX1, cuX2, cuX3, cuX4, cuX5, which would replace real functions"),
        ([], ["outblas_workspace"], 'it has no extern "C" function outblas_launch'),
    ],
)  # fmt: skip
def test_a_library_is_refused_by_the_first_five_names(asked, offered, words):
    assert why_refused(asked, offered) == words


@pytest.mark.parametrize("name", ["malloc", "cudaLaunchKernel", "__udivti3", "__divmoddi4", "__floatunditf", "__clzdi2",
                                  "_ZNSt6vectorIiSaIiEE", "_Znwm", "__cxa_throw"])  # fmt: skip
def test_names_of_launches_of_c_and_of_arithmetic_are_allowed(name):
    assert allowed(name)


@pytest.mark.parametrize("name", ["mallocx", "x__udivti3", "__udivti5", "_ZNSt6thread4joinEv", "_ZNSt6futureIiE3getEv",
                                  "_Znwmx_thread", "_ZN3foo", ""])  # fmt: skip
def test_other_names_are_not(name):
    assert not allowed(name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('#include "/etc/passwd"', '#include "/etc/passwd": only the provided headers are allowed'),
        ('#include "a/../b"', '#include "a/../b": only the provided headers are allowed'),
        ("#include " + "X" * 70, f'#include {"X" * 60}: write the header as <name> or "name"'),
        ('#include_next "/x"', '#include_next "/x": only the provided headers are allowed'),
        ("#line 5", "#line is not allowed"),
        ("#5", "#line is not allowed"),
        ("#pragma GCC dependency x", "#pragma GCC dependency x reads files"),
        ("#if __has_include(</x>)", "it tests whether </x> exists"),
        ("#if __has_include(<x>) && __has_include(X)", "it tests whether X exists"),
        ("#embed <x>", "#embed is not allowed: it reads files"),
        ('asm(".incbin x");', "assembly that reads a file (.incbin)"),
        ("// x\ry", "a carriage return without a line feed, which compilers interpret differently"),
        ('auto x = "\\u0041";', "it writes characters as numeric escapes (\\u0...)"),
        ("_Pragma(x)", "_Pragma is not allowed: write #pragma on its own line"),
        ("#ifdef __has_include", "__has_include without a header in parentheses"),
        ("cuModuleLoad(x);", "it names cuModuleLoad, which can load unchecked code"),
        ("auto f = asm;", "asm without its literals: write asm, then its literals in parentheses"),
        (f"asm({'W' * 50});", f"assembly from a macro ({'W' * 40}): write it as literals"),
    ],
)  # fmt: skip
def test_a_refused_text_is_told_why(line, words):
    assert refusal(f"int x;\n{line}\n") == words


@pytest.mark.parametrize(
    "line",
    ['#include "a/b..h"', "#include <a/b.cuh>", "#pragma once", "#if __has_include(<x>)", "int line;", "int __has_x;",
     '_Pragma("unroll 4")', 'auto x = "\\\\u0041";', 'asm volatile("a" : : "r"(x));', "int cuModule;", "#define A 5",
     "// #include things", "#error 5"],
)  # fmt: skip
def test_what_looks_like_it_is_not_refused(line):
    assert refusal(f"int x;\n{line}\n") is None


def test_assembly_of_the_host_is_read_more_strictly():
    text = 'int x;\nasm("a/" "*b");\n'
    assert refusal(text, False) is None
    assert refusal(text) == "a comment in assembly, which can split a word"


def test_a_directive_beside_a_comment_is_read_and_a_sentence_on_one_is_not():
    assert refusal("/* see */ #include X\n") is not None and refusal("see this #include of X\n") is None
    assert refusal("x" * 300 + "\n#include X\n") is not None
    assert refusal("\ufeff#include </x>\n") is not None
