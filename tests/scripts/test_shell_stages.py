"""The shell files of the stages: presets, what they print, and torchrun where there are several GPUs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import scripts.infer


def run_shell_stage(checkout: Path, stage: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/STAGE.sh of a checkout that holds only the shell files; `echo` stands in for Python."""
    shell = Path(scripts.infer.__file__).parent
    (checkout / "scripts").mkdir(exist_ok=True)
    for name in ("presets.sh", f"{stage}.sh"):
        shutil.copy(shell / name, checkout / "scripts" / name)
    command = ["bash", str(checkout / "scripts" / f"{stage}.sh"), *arguments]
    environment = {**os.environ, "PYTHON": "echo", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stage", ["collect", "train", "infer", "evaluate"])
def test_shell_stages_print_and_run_the_python_command_of_a_preset(tmp_path: Path, stage: str) -> None:
    unknown = run_shell_stage(tmp_path, stage, "GPT-5")
    assert unknown.returncode == 2 and "SmolLM2 Llama-3.2-3B Llama-3.1-8B OPT-125M OPT-6.7B" in unknown.stderr
    missing = run_shell_stage(tmp_path, stage, "OPT-125M")
    assert missing.returncode == 2 and "convert_llama_checkpoint.py --source facebook/opt-125m" in missing.stderr
    assert "bash scripts/quickstart.sh" in run_shell_stage(tmp_path, stage, "SmolLM2").stderr
    checkpoint = tmp_path / "outputs/smollm2/checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    done = run_shell_stage(tmp_path, stage, "SmolLM2", "--seed", "7 8")
    assert done.returncode == 0 and done.stdout.startswith(f"-m scripts.{stage} --model outputs/smollm2/checkpoint ")
    assert done.stdout.endswith(" --seed 7 8\n") and done.stderr.endswith("--seed 7\\ 8\n")
    distributed = run_shell_stage(tmp_path, stage, "SmolLM2", NUM_GPUS="4")
    assert distributed.stdout.startswith(f"-m torch.distributed.run --standalone --nproc-per-node 4 -m scripts.{stage}")
