"""The commands of outblas-lab. ``outblas`` finds this table by the entry point ``outblas.commands``."""

from __future__ import annotations

from typing import Any

from outblas.cli.command_table import Command, Part

_PACKAGE = __name__.rpartition(".")[0]


def _command(place: str, about: str, *resumable: str, **more: Any) -> Command:
    return Command(f"{_PACKAGE}.{place}", about, resumable=resumable, **more)


PARTS = (
    Part(
        "Study search and models",
        {
            "report": _command("report:report", "Write an HTML report of a run or result file"),
            "compare": _command("compare:compare", "Compare agents on held-out problems", "compare"),
            "train": _command("train:train", "Train the policy of the agent `ppo`", "train"),
            "recipe": _command(
                "study.recipe_command:recipe", "Compare a published reward with the gated one", "recipe"
            ),
            "recording": _command(
                "study.recording_group:recording", "Export a recording, or score an agent on it", "recording score"
            ),
            "evolve": _command("evolve:evolve", "Evolve kernels with LLMs", "evolve"),
            "train-llm": _command("train_llm:train_llm", "Train a language model to write kernels", "train-llm"),
            "mcp": _command("mcp:mcp", "Serve tools to a coding agent (MCP server)", has_result=False),
            "export-t4": _command("study.t4:export_t4", "Export measurements as Kernel Tuner T4 results"),
            "import-t4": _command("study.t4:import_t4", "Read and compare Kernel Tuner T4 results"),
        },
    ),
    Part(
        "Measure and publish",
        {
            "bench": _command("bench:bench", "Time the library over a suite (GPU)", "bench"),
            "record": _command("record:record", "Prove and time candidates over a suite (GPU)", "record"),
            "profile": _command("profile:profile", "Profile a run's best kernels (GPU)", "profile"),
            "results": _command("results:results", "Summarize published results"),
        },
    ),
    Part(
        "Build packaged data",
        {
            "build-library": _command(
                "build_library:build_library",
                "Build the packaged library from measurements",
                "build-library",
                epilog=f"{_PACKAGE}.build_library:STEPS_HELP",
            ),
            "fit": _command("fit:fit", "Fit packaged models to measurements", "fit any-shape"),
        },
    ),
)
#: Extra of outblas-lab -> the modules of its packages.
MODULES = {
    "rl": ("gymnasium", "optuna", "sb3_contrib", "tensorboard"), "llm": ("openai", "tenacity"),
    "gguf": ("xllamacpp",), "mcp": ("mcp", "mcp_types"), "train-llm": ("trl", "peft", "accelerate", "datasets"),
    "report": ("jinja2", "matplotlib"), "wandb": ("wandb",), "ray": ("ray",), "kernel-tuner": ("kernel_tuner",),
}  # fmt: skip
#: Optional package -> the extra of outblas-lab that brings it.
EXTRAS = {module: extra for extra, modules in MODULES.items() for module in modules}
