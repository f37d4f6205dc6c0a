"""The commands of outblas-lab. ``outblas`` finds this table by the entry point ``outblas.commands``."""

from __future__ import annotations

from outblas.cli.command_table import Command, Part

_PACKAGE = __name__.rpartition(".")[0]
PARTS = (
    Part(
        "Study search and models",
        {
            "report": Command(f"{_PACKAGE}.report:report", "Write an HTML report of a run or result file"),
            "compare": Command(
                f"{_PACKAGE}.compare:compare", "Compare agents on held-out problems", resumable=("compare",)
            ),
            "train": Command(f"{_PACKAGE}.train:train", "Train the policy of the agent `ppo`", resumable=("train",)),
            "recipe": Command(
                f"{_PACKAGE}.study.recipe_command:recipe",
                "Compare a published reward with the gated one",
                resumable=("recipe",),
            ),
            "recording": Command(
                f"{_PACKAGE}.study.recording_group:recording",
                "Export a recording, or score an agent on it",
                resumable=("recording score",),
            ),
            "evolve": Command(f"{_PACKAGE}.evolve:evolve", "Evolve kernels with LLMs", resumable=("evolve",)),
            "train-llm": Command(
                f"{_PACKAGE}.train_llm:train_llm",
                "Train a language model to write kernels",
                resumable=("train-llm",),
            ),
            "mcp": Command(f"{_PACKAGE}.mcp:mcp", "Serve tools to a coding agent (MCP server)", has_result=False),
            "export-t4": Command(f"{_PACKAGE}.study.t4:export_t4", "Export measurements as Kernel Tuner T4 results"),
            "import-t4": Command(f"{_PACKAGE}.study.t4:import_t4", "Read and compare Kernel Tuner T4 results"),
        },
    ),
    Part(
        "Measure and publish",
        {
            "bench": Command(f"{_PACKAGE}.bench:bench", "Time the library over a suite (GPU)", resumable=("bench",)),
            "record": Command(
                f"{_PACKAGE}.record:record", "Prove and time candidates over a suite (GPU)", resumable=("record",)
            ),
            "profile": Command(
                f"{_PACKAGE}.profile:profile", "Profile a run's best kernels (GPU)", resumable=("profile",)
            ),
            "results": Command(f"{_PACKAGE}.results:results", "Summarize, write and check published results"),
        },
    ),
    Part(
        "Build packaged data",
        {
            "build-library": Command(
                f"{_PACKAGE}.build_library:build_library",
                "Build the packaged library from measurements",
                resumable=("build-library",),
                epilog=f"{_PACKAGE}.build_library:STEPS_HELP",
            ),
            "fit": Command(f"{_PACKAGE}.fit:fit", "Fit packaged models to measurements", resumable=("fit any-shape",)),
        },
    ),
)
#: Optional package -> the extra of outblas-lab that brings it.
EXTRAS = {
    "gymnasium": "rl",
    "sb3_contrib": "rl",
    "optuna": "rl",
    "wandb": "wandb",
    "openai": "llm",
    "tenacity": "llm",
    "jinja2": "report",
    "matplotlib": "report",
    "trl": "train-llm",
    "mcp": "mcp",
    "mcp_types": "mcp",
    "peft": "train-llm",
    "datasets": "train-llm",
    "ray": "ray",
    "kernel_tuner": "kernel-tuner",
}
