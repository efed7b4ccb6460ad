"""Programs of other people that tests launch, and how."""

from __future__ import annotations

import json
import random
import textwrap
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.run.launch.command import Launched, start

TRAINER = """\
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import mpctl
from neighbour import SIZE

steps, fails_at = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(SIZE, 1)
saved, first = os.path.join(os.environ["MPCTL_CHECKPOINT_DIR"], "last.pt"), 1
if os.path.exists(saved):
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    first = state["step"] + 1
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
for step in range(first, steps + 1):
    torch.manual_seed(100 * step + dist.get_rank())
    x = torch.randn(16, SIZE)
    loss = (replica(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    mpctl.heartbeat(step, loss=total / 2, tokens=32 * step, mine=float(step))
    if step % 2 == 0 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, saved + ".new")
        os.replace(saved + ".new", saved)
    if step == fails_at and os.environ["MPCTL_ATTEMPT"] == "0" and dist.get_rank() == 1:
        raise ValueError("a sample of 3 tokens")
    stops = torch.tensor(int(mpctl.stop_requested()))
    dist.all_reduce(stops)
    if stops:
        break
dist.destroy_process_group()
"""
"""Trains by torch's DDP on two ranks and saves every second step; rank 1 fails once at a step."""


ACCELERATE = """\
import torch
from accelerate import Accelerator
import mpctl

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
data = torch.utils.data.TensorDataset(torch.randn(160, 8))
loader = torch.utils.data.DataLoader(data, batch_size=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x,) in enumerate(loader, start=1):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    mpctl.heartbeat(step, loss=accelerator.gather(loss.detach()[None]).mean())
accelerator.wait_for_everyone()
accelerator.end_training()
"""

HELD_BY_GLOO = """\
import atexit, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Held(torch.Tensor):
    def __del__(self):  # in gloo's thread, which lets go of it last
        time.sleep(0.5)

def write(name):
    time.sleep(0.2)
    open(name, "w").write("whole")

dist.init_process_group("gloo")
name = f"rank {dist.get_rank()}, "
model = DistributedDataParallel(torch.nn.Linear(2, 2))
held = torch.zeros(1).as_subclass(Held)
work = dist.all_reduce(held, async_op=True)
del held, work
if "destroys" in sys.argv:
    dist.destroy_process_group()  # the model holds it still
atexit.register(write, name + "at exit")
threading.Thread(target=write, args=(name + "by a thread",)).start()
sys.never_closed = open(name + "not closed", "w")
sys.never_closed.write("whole")
print("also", end=" ")
if "exits" in sys.argv:
    sys.exit()
"""
"""Ends while a thread of gloo still has to release a tensor; CPython before 3.14 aborts then."""

MEGATRON_CORE = """\
import os
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
import mpctl

class CpuAttention(torch.nn.Module):
    # Megatron-Core's own takes its buffer from a GPU.
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, query, key, value, *args, **kwargs):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)

dist.init_process_group("gloo")
sizes = {axis: int(os.environ[f"MPCTL_{axis}_SIZE"]) for axis in ("TP", "PP")}
parallel_state.initialize_model_parallel(sizes["TP"], sizes["PP"])
assert parallel_state.get_tensor_model_parallel_rank() == int(os.environ["MPCTL_TP_RANK"])
group = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
assert group == [int(rank) for rank in os.environ["MPCTL_TP_GROUP"].split(",")]
torch.manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
    tensor_model_parallel_size=sizes["TP"], hidden_dropout=0.0, attention_dropout=0.0,
    gradient_accumulation_fusion=False, bias_activation_fusion=False,
    masked_softmax_fusion=False,
)
spec = get_gpt_layer_local_spec()
spec.submodules.self_attention.submodules.core_attention = CpuAttention
model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
numbers = torch.Generator().manual_seed(7)
for step in range(1, 6):
    tokens = torch.randint(0, 16, (4, 33), generator=numbers)
    place, mask = torch.arange(32).expand(4, -1), torch.ones(1, 1, 32, 32).triu(1).bool()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    loss = model(inputs, place, mask, labels=labels).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mpctl.heartbeat(step, loss=loss, tokens=128 * step)
dist.destroy_process_group()
"""

TORCHTITAN = """\
import runpy, sys, types
import torch, torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import flex_attention

# A device that is the CPU, with a GPU's answers.
cpu = types.ModuleType("cpu")
cpu.__dict__.update(torch.cpu.__dict__)
cpu.get_device_name = lambda *_: "cpu"
cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**34)
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
cpu.memory_stats = lambda *_: {}
cpu.current_device = lambda: 0
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: cpu

import torchtitan.train
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry

# The same attention by an operator that has a gradient on a CPU; a reduction that gloo knows.
def attend(q, k, v, *, block_mask, scale, enable_gqa, **_):
    shape = (len(q), 1, q.shape[2], k.shape[2])
    mask = flex_attention.create_mask(block_mask.mask_mod, *shape, device="cpu")
    product = torch.nn.functional.scaled_dot_product_attention
    return product(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None

def divide_a_sum(module, factor):
    module.set_force_sum_reduction_for_comms(True)
    set_factor(module, factor)

set_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = divide_a_sum
FlexAttention._compiled_flex_attn = attend
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13
    torch.distributed.set_timeout = lambda timeout, group=None: None

def tiny():
    config = config_registry.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config = runpy.run_path(plan)["lay_out"](config)
    config.parallelism.spmd_backend = "partial_dtensor"  # its default needs a later torch
    config.hf_assets_path, config.dataloader.dataset_path = "tokenizer", "texts"
    config.validator = type(config.validator)(freq=1000, steps=1)
    return config

config_registry.tiny = tiny
plan, sys.argv[1:] = sys.argv[1], ["--module", "llama3", "--config", "tiny"]
torchtitan.train.main()
"""
"""torchtitan's own command on CPU ranks, with the layout of the file that is its only argument."""

TORCHTITAN_SHAPE = {
    "runtime": "torchtitan",
    "model": "llama-3-8b",
    "model.layers": 2,
    "model.hidden": 256,
    "model.heads": 16,
    "model.kv_heads": 16,
    "model.ffn": 768,
    "model.vocab": 2048,
    "model.seq_length": 64,
    "training.micro_batch_size": 2,
    "training.dtype": "fp32",
    "training.steps": 6,
    "training.warmup_steps": 2,
    "training.recompute": "none",
}
"""Its llama3_debugmodel, with two layers, as a job."""

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_ddp.py"


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


def trainer(folder: Path) -> Path:
    """train.py, which imports a module beside it."""
    write(folder, "neighbour.py", "SIZE = 8\n")
    return write(folder, "train.py", TRAINER)


def torchtitan_files(folder: Path) -> None:
    """A tokenizer of bytes and texts of a few words, where TORCHTITAN looks for them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    write(folder / "tokenizer", "tokenizer.json", tokenizer.to_str())
    write(folder / "tokenizer", "tokenizer_config.json", json.dumps(ends))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(("one", "two", "three"), k=60)) for _ in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    write(folder / "texts", "data.json", lines)


def run_program(run_dir: Path, program: str, *more: str, ranks: int = 2) -> Launched:
    """A launch of a program at dp `ranks`, typed in the folder `here` beside the run."""
    here = run_dir.parent / "here"
    here.mkdir(parents=True, exist_ok=True)
    layout = ["--nodes", "1", "--gpus-per-node", str(ranks)]
    layout += () if "--tp" in more else ("--dp", str(ranks))
    options = ["--device", "cpu", "--run-dir", str(run_dir), "--program", program]
    return start(["launch", *layout, *options, *more], run_dir, cwd=here)
