"""The hash of the kernel files: what leaves it as it is, what changes it, and that text with traps is read right."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.kernels import kernel_hash
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.kernel_hash import (
    headers_sha,
    kernel_headers,
    kernels_sha,
    without_comments,
)
from outblas.kernels.source import make_source
from outblas_lab.custom import cuda_text

NAMES = [name for name, _ in kernel_headers()]


def by_scan(text: str) -> str:
    """The plain form by the lexer that judges free kernels."""
    parts = [
        (" " if p.kind in ("comment", "space") else p.text)
        for p in cuda_text.split_text(cuda_text.join_continued_lines(text))
    ]
    joined = "".join(part for i, part in enumerate(parts) if part != " " or i == 0 or parts[i - 1] != " ")
    return "\n".join(filter(None, (line.strip(" ") for line in joined.split("\n"))))


def same(name: str, text: str) -> bool:
    """Return whether the hash stays the same if a kernel file gets another text."""
    return headers_sha([(name, text)]) == headers_sha([(name, dict(kernel_headers())[name])])


@pytest.mark.parametrize("name", NAMES)
def test_a_comment_or_blanks_leave_the_hash_and_a_token_does_not(name: str) -> None:
    text = dict(kernel_headers())[name]
    assert "//" in text and "\n" in text
    for other in (
        "// A word more.\n" + text + "\n/* And\n * three\n * lines. */\n",
        re.sub("//.*", "// another", text) if '"//' not in text else text,
        re.sub(r"(?<!\\)\n", " /* here */ // too\n", text),
        re.sub("^ +", "\t\t", text, flags=re.M),
        re.sub(r"(?<!\\)\n", "  \n\n", text),
    ):
        assert same(name, other)
    first = re.search(r"^#pragma once\n(.*)", text, re.S | re.M)
    assert first is not None
    for other in (text + "int x;\n", text.replace("#pragma once", "#pragma  twice"), text.replace(first[1], "")):
        assert not same(name, other)


def test_every_token_counts() -> None:
    """Any one word of any file, its name and its order among the files."""
    rng = random.Random(0)
    for name, text in kernel_headers():
        form = without_comments(text)
        word = rng.choice(list(re.finditer(r"\w+", form)))
        assert not same(name, form[: word.start()] + "other" + form[word.end() :])
        assert same(name, form), "the plain form is its own plain form"
    first, *rest = kernel_headers()
    assert headers_sha([(first[0], first[1] + "// a word"), *rest]) == kernels_sha()
    assert headers_sha([(first[0], first[1] + "int x;"), *rest]) != kernels_sha()
    assert headers_sha([("renamed.cuh", first[1]), *rest]) != kernels_sha()
    assert headers_sha(rest) != kernels_sha()


def test_no_kernel_file_is_hashed_as_written() -> None:
    """Such a file would lose its hash by a comment."""
    for name, text in kernel_headers():
        assert without_comments(text) == by_scan(text) != text, name


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("a/**/b", "a b"),
        ("a /* x */ b", "a b"),
        ("a  \t b", "a b"),
        ("a\nb", "a\nb"),
        ("a // b", "a"),
        ("a // b\nc", "a\nc"),
        ("  a\n\n\t\n  b  ", "a\nb"),
        ("a /* 1\n2 */ b", "a b"),
        ("a\n/* 1\n2 */\nb", "a\nb"),
        ("a / b // c", "a / b"),
        ("a /* // */ b", "a b"),
        ("a // /*\nb // */", "a\nb"),
        ("a /*/ b */ c", "a c"),
        ("a /* unclosed\nb", "a"),
        ('s = "//";  t', 's = "//"; t'),
        ('s = "/* no */  comment" // one', 's = "/* no */  comment"'),
        (r's = "\"// in";  // out', r's = "\"// in";'),
        (r's = "\\"; // out', r's = "\\";'),
        ("c = '\"'; // x", "c = '\"';"),
        (r"c = '\''; // x" + "\nd = '\"'", r"c = '\'';" + "\nd = '\"'"),
        ("c = '//';  d", "c = '//'; d"),
        ("n = 1'000'000; // x' y", "n = 1'000'000;"),
        ("n = 0x1'f;  c = 'a  b';", "n = 0x1'f; c = 'a  b';"),
        ("n = a1 'x  y'", "n = a1 'x  y'"),
        ("#error don't // this", "#error don't // this"),
        ('#include "a//b.cuh"  // c', '#include "a//b.cuh"'),
        ("#define F(x) /* of\n x */ (x)  // y", "#define F(x) (x)"),
        ("#define A 1 \\\n  + 2 // c\nb", "#define A 1 + 2\nb"),
        ("a // goes on \\\n here\nb", "a\nb"),
        ("a /\\\n/ b\nc", "a\nc"),
        ('s = "a\\\nb  c";', 's = "ab  c";'),
        ('R"(// no)"  // one', 'R"(// no)"'),
        ('R"x(a)"  b)x"  /* one */ c', 'R"x(a)"  b)x" c'),
        ('u8R"(/*)" + "*/"  // x', 'u8R"(/*)" + "*/"'),
        ('LR"(\n  a \n\n)"  ;', 'LR"(\0  a \0\0)" ;'),
        ('FOR"(a  b"', 'FOR"(a  b"'),
        ('FOR"(a" // b)"', 'FOR"(a"'),
    ],
)
def test_text_with_traps(text: str, form: str) -> None:
    assert without_comments(text) == form


@pytest.mark.parametrize(
    "text",
    [
        "a // b \\ \n c  d",
        "a ??/  b",
        "a\rb  c",
        'R"(a\\\n  b)"',
        "#include <a//b>  // c",
        "int x = __LINE__;  // c",
        "assert(x);  // c",
        "a\0b  c",
    ],
)
def test_what_compilers_may_read_in_two_ways_stays_as_written(text: str) -> None:
    assert without_comments(text) == text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ab", "a/**/b"),
        ("a\nb", "a b"),
        ('"a b"', '"a  b"'),
        ('"//x"', '"//y"'),
        ("'a'", "'b'"),
        ('R"(a\n b)"', 'R"(a\nb)"'),
        ('R"(a\n\nb)"', 'R"(a\nb)"'),
        ("#define F(x)", "#define F (x)"),
        ("a + +b", "a ++b"),
        ("static_assert(a)", "static_assert(b)"),
    ],
)
def test_what_differs_has_another_form(one: str, other: str) -> None:
    assert without_comments(one) != without_comments(other)
    assert headers_sha([("a", one)]) != headers_sha([("a", other)])


def test_it_reads_text_as_the_lexer_of_free_kernels_does() -> None:
    """Compare on random text that the free kernels' lexer does not call ambiguous."""
    rng = random.Random(1)
    parts = ["12", "  ", "//", "/*", "*/", "e+", *"a1 \t\n\n/*\"'\\#(."]
    compared = 0
    for _ in range(4000):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 14)))
        if not cuda_text.is_ambiguous(text) and not kernel_hash._AS_WRITTEN.search(text):
            assert without_comments(text) == by_scan(text), repr(text)
            compared += 1
    assert compared > 2000


def test_a_kernel_compiles_to_the_same_bytes_from_the_plain_form() -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC is not installed")
    from outblas.runtime.nvrtc import compile_source

    source = make_source(Problem(64, 64, 512), Sm80DirectConfig(16, 8))
    short = replace(source, headers=tuple((name, without_comments(text)) for name, text in source.headers))
    assert compile_source(short, cache=None).image == compile_source(source, cache=None).image


def test_the_hash_is_of_names_within_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in a folder of another name, at another place, have the same hash."""
    for name, text in kernel_headers():
        (tmp_path / "of_another_name" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "of_another_name" / name).write_text(text)
    (tmp_path / "of_another_name" / "__init__.py").touch()
    monkeypatch.setattr(kernel_hash, "KERNELS_FOLDER", "of_another_name")
    monkeypatch.setattr(kernel_hash.resources, "files", lambda package: tmp_path)
    kernel_headers.cache_clear()
    try:
        assert headers_sha(kernel_headers()) == kernels_sha()
    finally:
        kernel_headers.cache_clear()


def test_it_is_the_same_in_every_process() -> None:
    ask = "import json; from outblas.kernels.kernel_hash import *; print(json.dumps([kernels_sha(), kernel_headers()]))"
    done: Any = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [kernels_sha(), [list(pair) for pair in kernel_headers()]]
