"""Launch scripts read without a shell: variables, arrays, conditions, ranks, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.interop.command_line import read_flags
from mpctl.interop.mapping import ReadJob
from mpctl.interop.shell import is_script, read_script

SHAPE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048"
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node 8
export CUDA_DEVICE_MAX_CONNECTIONS=1
NNODES=${{SLURM_NNODES:-1}}   # of the scheduler
GPUS=$((4 * 2))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
TP=4; PP=${{PP:-2}}
MODEL_ARGS=(
    {SHAPE}
    --vocab-size 32000
    # --swiglu
    --bf16    # comment
)
MODEL_ARGS+=("--recompute-granularity selective")
OPTIONS=" \\
    --micro-batch-size 1 \\
    --global-batch-size $((TP * 32))"
if [ -n "${{WANDB_API_KEY}}" ]; then
    MODEL_ARGS+=(--wandb-project $PROJECT)
elif [[ "$TP" == "4" && x ]]; then :
fi
while [[ $# -gt 0 ]]; do
    case $1 in --tp) TP=$2; shift ;; esac
    shift
done
cd "$(dirname "$0")" && torchrun --nnodes $NNODES --nproc_per_node=$GPUS --master_addr $HEAD pretrain_gpt.py \\
    "${{MODEL_ARGS[@]/x/y}}" ${{MODEL_ARGS[@]}} $OPTIONS \\
    --tensor-model-parallel-size ${{TP}} --pipeline-model-parallel-size "$PP" --save $OUT/gpt 2>&1 | tee log
""".replace('"${MODEL_ARGS[@]/x/y}" ', "")


def read(text: str) -> ReadJob:
    return read_flags("megatron", text)


def told(text: str, launcher: str = "megatron") -> str:
    with pytest.raises(InputError) as caught:
        read_flags(launcher, text)
    return "\n".join(map(str, caught.value.issues))


def test_a_script_is_expanded_to_its_launch() -> None:
    job = read(SCRIPT)
    names = ("parallel.tp", "parallel.pp", "cluster.nodes", "cluster.gpus_per_node", "training.global_batch_size")
    assert [job.settings[name] for name in names] == [4, 2, 4, 8, 128]
    assert (job.settings["training.dtype"], job.settings["training.recompute"]) == ("bf16", "selective")
    (assumed,) = [check for check in job.warnings if check.rule == "script-environment"]
    assert assumed.message.startswith('line 19: if [ -n "${WANDB_API_KEY}" ]')


def test_windows_line_ends_are_read() -> None:
    assert read(SCRIPT.replace("\n", "\r\n")).settings == read(SCRIPT).settings


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize(
    "lines",
    [
        "A=(--x 1 '--y 2'); B=${A[@]}; torchrun p.py ${A[@]} \"${A[@]}\" $B",
        'A=3; torchrun p.py --a ${B:-"x"} --b=${A:+yes} --c "${B-}" --d$((A*2-1)) ${#A}',
        "A=(); torchrun p.py --a ${A[@]} \"${A[@]}\" '$A' \"a 'b'\" c\\ d",
        "A=(one two); A+=(three); torchrun p.py --n ${#A[@]} ${A[1]} ${A[@]} ${A}",
        "X=2; case $X in 1) S=a ;; 2|3) S=b ;; *) S=c ;; esac; torchrun p.py --s $S",
        'if [ "7" -gt 5 ] && [[ ab == a* ]]; then N=1; else N=2; fi; torchrun p.py --n $N',
        'N=1; [ -z "$N" ] && N=5; [[ $N -eq 1 ]] || N=7; torchrun p.py --n $N',
        "for N in 8; do torchrun p.py --n $N; done",
        'C="torchrun p.py --n 5"; eval $C "--m \'6 7\'"',
        'O="--a 1 \\\n --b 2"; bash -c "torchrun p.py $O"',
        "for i in 1 2; do :; done; if false; then N=1; elif true; then N=2; fi; torchrun p.py --n ${N:=4}",
    ],
)
def test_expansions_are_those_of_bash(lines: str, tmp_path: Path) -> None:
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/bash\nfor word in torchrun "$@"; do printf "%s\\0" "$word"; done\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", lines], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, check=True
    )
    assert [*read_script(lines).words] == done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 8 p.py --x 1", (2, 8)),
        ("python -m torch.distributed.launch --nproc_per_node 4 p.py --x 1", (None, 4)),
        ("srun -N 3 --ntasks-per-node=8 python p.py --x 1", (3, 8)),
        ("srun --nodes 2 torchrun --nproc_per_node 4 p.py --x 1", (2, 4)),
        ("deepspeed --num_nodes 2 --num_gpus 8 p.py --x 1", (2, 8)),
        ("accelerate launch --num_machines 2 --num_processes 16 p.py --x 1", (2, 8)),
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:4\nsrun python -u p.py --x 1", (2, 4)),
        ("torchrun --nnodes 1:4 --nproc_per_node auto p.py --x 1", (None, None)),
        ("N=$(wc -l < hosts)\ntorchrun --nnodes $N p.py --x 1", (None, None)),
    ],
)
def test_ranks_are_those_of_the_launcher(line: str, ranks: tuple[int | None, int | None]) -> None:
    cluster = read_script(line).cluster
    assert (cluster.get("cluster.nodes"), cluster.get("cluster.gpus_per_node")) == ranks


def test_what_only_a_run_gives_is_refused_by_its_line_where_it_matters() -> None:
    flags = f"{SHAPE} --vocab-size 32000 --save $OUT"
    line = "OUT=$(date)\nTP=$(cat tp)\ntorchrun --nproc_per_node 8 p.py"
    assert read(f"{line} {flags}").settings["cluster.gpus_per_node"] == 8
    assert "(line 2: TP=$(cat tp): write its value there" in told(f"{line} {flags} --tensor-model-parallel-size $TP")
    loop = "for TP in 1 2 4; do\n torchrun p.py --tensor-model-parallel-size $TP\ndone"
    assert "line 2 launches a training under line 1: for TP in 1 2 4; do" in told(loop)
    unsure = "A=(--bf16)\nif [ -f x ]; then\n A=(--fp16)\nfi\ntorchrun p.py ${A[@]}"
    assert "line 2: if [ -f x ]; then" in told(unsure)
    assert "$1" in told("torchrun p.py --tensor-model-parallel-size $1")


def test_a_number_of_nodes_that_is_not_known_is_a_warning_with_its_line() -> None:
    text = f"N=$(wc -l < hosts)\ntorchrun --nnodes $N --nproc_per_node 8 p.py {SHAPE} --vocab-size 32000"
    (warning,) = [check for check in read(text).warnings if check.rule == "script-ranks"]
    assert "line 1: N=$(wc -l < hosts)" in warning.message and "--nodes N" in warning.hint
    assert not [c for c in read_flags("megatron", text, {"cluster.nodes": 2}).warnings if c.rule == "script-ranks"]


def test_a_default_number_of_nodes_is_said() -> None:
    text = f"N=${{SLURM_NNODES:-1}}\ntorchrun --nnodes $N --nproc_per_node 8 p.py {SHAPE} --vocab-size 32000"
    (warning,) = [check for check in read(text).warnings if check.rule == "script-environment"]
    assert warning.message == "SLURM_NNODES is not set: planned with its default, 1"
    assert not [c for c in read(f"#SBATCH --nodes=2\n{text}").warnings if c.rule == "script-environment"]


def test_other_files_are_named_and_not_read() -> None:
    text = f'source /nowhere/env.sh\npython prep.py --a 1\ntorchrun p.py {SHAPE} --vocab-size 32000 --lr $LR "$@"'
    rules = {check.rule: check.message for check in read(text.replace("--lr $LR", "")).warnings}
    assert "line 1: source /nowhere/env.sh" in rules["script-source"]
    assert "line 2 starts Python, too" in rules["script-launches"] and "script-arguments" in rules


def test_a_config_that_a_launch_names_is_asked_for() -> None:
    text = "deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed ds.json --bf16"
    assert "--from deepspeed @ds.json --nodes 2 --gpus-per-node 8" in told(text, "deepspeed")
    assert "--from nanotron @c.yaml" in told("torchrun run_train.py --config-file c.yaml", "nanotron")
    written = f'B=64\ncat <<EOT > ds.json\n{{"train_batch_size": $B, "zero_optimization": {{"stage": 3}}}}\nEOT\n{text}'
    job = read_flags("deepspeed", written).settings
    assert (job["training.global_batch_size"], job["parallel.zero"], job["cluster.nodes"]) == (64, 3, 2)


TORCHTITAN = """#!/usr/bin/bash
NGPU=${NGPU:-"8"}
CONFIG=${CONFIG:-"FILE"}
if [ -n "$COMM_MODE" ]; then
    python3 -m torchtitan.train --job.config_file "$CONFIG" --comm.mode=${COMM_MODE}
else
    PYTORCH_ALLOC_CONF="expandable_segments:True" torchrun --nproc_per_node=${NGPU} --rdzv_endpoint="localhost:0" \\
    --local-ranks-filter ${LOG_RANK:-0} -m ${TRAIN_FILE:-torchtitan.train} --job.config_file ${CONFIG} "$@"
fi
"""


def test_a_script_of_torchtitan_names_a_module_and_a_config(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 4\n")
    job = read_flags("torchtitan", TORCHTITAN.replace("FILE", str(file), 1)).settings
    assert (job["parallel.tp"], job["training.micro_batch_size"], job["cluster.gpus_per_node"]) == (4, 2, 8)


def test_a_value_that_bash_splits_is_told_its_quotes() -> None:
    text = 'A=(--step-batch-size-schedule "0:16 2B:32")\ntorchrun p.py ${A[@]}'
    assert 'write "${ARGS[@]}" in quotes on line 2' in told(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\xff\xfe", "no text: byte"),
        (b"torchrun\0p.py", "null bytes"),
        (b"#" * (2**20 + 1), "more than 1,048,576 bytes"),
        (b"torchrun p.py --x 'a", "a quote ' is not closed"),
        (b"A=(1 2\ntorchrun p.py --x 1", "line 1: a bracket ( is not closed"),
        (b"if true; then\ntorchrun p.py --x 1", "line 1: 'if' has no 'fi'"),
        (b"#!/bin/bash\necho hello", "no command that launches"),
        (b"A=(xxxxxxxx)\n" + b"A=(${A[@]} ${A[@]})\n" * 40 + b"torchrun p.py ${A[@]}", "grows beyond"),
        (b"if true; then " * 3000, ""),
    ],
)
def test_files_that_are_no_script_are_answered(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_bytes(content)
    assert message in told(f"@{file}")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab A=$(){}[]\"'`\\\n;&|<>#@:-+*1 iftheno", max_size=60))
def test_no_text_ends_in_a_traceback(text: str) -> None:
    with suppress(InputError):
        read_script(f"{text}\ntorchrun p.py --x 1")


@pytest.mark.parametrize("text", ["[training]\nsteps = 1", "parallelism:\n  tp: 2", '{"bf16": true}', "--bf16 --lr $X"])
def test_configs_and_bare_flags_are_no_scripts(text: str) -> None:
    assert not is_script(text)


def test_a_vocabulary_is_that_of_the_preset_with_the_same_shape() -> None:
    llama = "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --swiglu"
    llama += " --group-query-attention --num-query-groups 8 --position-embedding-type rope --disable-bias-linear"
    job = read(f"{llama} --rotary-base 500000")
    assert job.settings["model.vocab"] == 128256
    (warning,) = [check for check in job.warnings if check.rule == "megatron-vocabulary"]
    assert "preset llama-3-70b" in warning.message
    refused = told(f"{llama} --rotary-base 1000000")
    assert "32000 (llama-2-70b)" in refused and "128256 (llama-3-70b)" in refused
    assert "add it, or --set model.vocab=N" in told(llama.replace("8192", "8064"))
