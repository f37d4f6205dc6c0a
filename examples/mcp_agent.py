"""A scripted agent that asks ``outblas mcp``: from a naive kernel to an installed one, without a GPU.

    pip install . './lab[free,mcp]'
    python examples/mcp_agent.py [--page docs/llm/mcp.md]

It starts the server as a process, as a client does, and prints what it says and what comes back. ``--page`` writes that
into a page, between its marks. The agent's choices are written below; only the answers are the server's. No GPU is
used, even if there is one: the compiler answers for the free kernel, the packaged recording for template kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from outblas.core.problem import Problem
from outblas.records.library import Library

PROBLEM = Problem(512, 512, 512)
BEGIN, END = "<!-- begin: transcript -->", "<!-- end: transcript -->"
NAIVE = """/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 16)", "ceil(M, 16)", 1], "block": [16, 16, 1]}
*/
#include <cuda_fp16.h>
extern "C" __global__ void gemm(const half* A, const half* B, half* C, int M, int N, int K, void* workspace) {
  int col = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
  if (row >= M || col >= N) return;
  float sum = 0.0f;
  for (int k = 0; k < K; ++k) sum += __half2float(A[row * K + k]) * __half2float(B[col * K + k]);
  C[row * N + col] = __float2half(sum);
}
"""


class Transcript:
    """The lines of a session, in Markdown, and the client that answers.

    Args:
        client: a connected client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.lines: list[str] = []

    def says(self, text: str) -> None:
        """Add a sentence of the agent."""
        self.lines += [f"**Agent:** {text}", ""]

    def shows(self, language: str, text: str) -> None:
        """Add a fenced block."""
        self.lines += [f"```{language}", without_times(text).rstrip("\n"), "```", ""]

    async def reads(self, uri: str) -> None:
        """Read a resource and show its first sentence."""
        result = await self._client.read_resource(uri)
        text = getattr(result.contents[0], "text", "")
        self.shows("text", f"read {uri}\n{' '.join(text.split('. ')[0].split())}. ...")

    async def calls(self, tool: str, shown: Sequence[str], **arguments: Any) -> dict[str, Any]:
        """Call a tool, show the named keys of its answer or its error, and return the answer.

        Args:
            tool: name of the tool.
            shown: keys of the answer, ``outer.inner`` for one inside another.
            arguments: arguments of the tool. A kernel's text is shown as ``NAIVE``.
        """
        result = await self._client.call_tool(tool, arguments)
        asked = json.dumps({**arguments, **({"kernel": "NAIVE"} if "kernel" in arguments else {})})
        if result.is_error:
            self.shows("text", f"{tool} {asked}\n{getattr(result.content[0], 'text', '')}")
            return {}
        answer = dict(result.structured_content)
        lines = (f"{key}: {json.dumps(inner(answer, key))}" for key in shown)
        self.shows("text", "\n".join([f"{tool} {asked}", *lines]))
        return answer


def inner(answer: Mapping[str, Any], key: str) -> Any:
    """Return the value of ``outer.inner`` in nested mappings."""
    found: Any = answer
    for part in key.split("."):
        found = found[part]
    return found


def without_times(text: str) -> str:
    """Return a text in which ``? ms`` replaces the times that depend on the machine."""
    return re.sub(r"\d+(\.\d+)? ms\b", "? ms", text)


async def play(client: Client, folder: Path) -> list[str]:
    """Play the agent against a server and return the lines of the transcript.

    Args:
        client: a client of a server whose archive is ``folder``.
        folder: folder of the archive, which the last step reads.
    """
    t, mnk = Transcript(client), PROBLEM.mnk
    t.says(f"I want a fast kernel for {mnk}, layout TN, fp16. I read the guide and write a naive kernel, `NAIVE`.")
    await t.reads("outblas://guide")
    t.shows("cuda", NAIVE)
    await t.calls("compile", ("status", "detail", "registers", "spill_bytes", "sass"), mnk=mnk, kernel=NAIVE)
    t.says("It compiles, and has no matrix instruction (`hgmma`, `hmma`). Is it right?")
    await t.calls("prove", (), mnk=mnk, kernel=NAIVE)
    t.says("Nothing can run it here. So I ask what is known about this product, and what I have to beat.")
    await t.calls("best-known", ("floor_us", "recording.source", "recording.baselines_us"), mnk=mnk)
    t.says("I try knobs of a template family. `wgmma` is the matrix instruction of this GPU.")
    guess = {"family": "sm90_wgmma_gemm", "bm": 128, "bn": 128, "stages": 40}
    await t.calls("compile", ("status", "detail"), mnk=mnk, config=guess)
    t.says("Too many stages. I let the cost model choose, and compile its first choice.")
    found = await t.calls("suggest", ("agent", "offered", "source"), mnk=mnk, count=3)
    kernels = [one["config"] for one in found["suggestions"]]
    await t.calls("compile", ("status", "registers", "spill_bytes", "sass"), mnk=mnk, config=kernels[0])
    t.says("It multiplies with `hgmma` and spills nothing. I time all three.")
    shown = ("proven", "source", "us", "speedup", "library_would_install")
    timed = [(await t.calls("time", shown, mnk=mnk, config=config), config) for config in kernels]
    best, config = max(timed, key=lambda pair: pair[0]["speedup"]["low"])
    t.says(f"The fastest takes {best['us']} µs, {best['speedup']['ratio']} times as fast as {best['speedup']['over']}.")
    await t.calls("archive", ("stored", "library", "budget_left"), action="store", mnk=mnk, config=config)
    row = Library.load(folder / "library.json").lookup(PROBLEM)
    assert row is not None and row.pdl is not None
    t.says(f"Done: `library.json` has the kernel, with a speed-up of at least {row.pdl.low:.4f} by its own rule.")
    return t.lines


async def transcript(folder: Path) -> str:
    """Start a server with its archive in a folder, play the agent, and return the transcript as Markdown.

    Args:
        folder: folder of the archive; it is made.
    """
    options = ["--device", "compile", "--run", str(folder), "--compilations", "10", "--evaluations", "10"]
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "outblas", "mcp", *options], env=dict(os.environ)
    )
    async with Client(server) as client:
        return "\n".join(await play(client, folder))


def with_transcript(page: str, text: str) -> str:
    """Return a page in which the text between the marks is replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the transcript, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="page to write the transcript into")
    page = parser.parse_args().page
    with tempfile.TemporaryDirectory(prefix="outblas-mcp-") as scratch:
        text = asyncio.run(transcript(Path(scratch) / "kernels"))
    if page is None:
        print(text)
        return
    page.write_text(with_transcript(page.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
