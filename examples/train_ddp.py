"""A trainer by torch's DDP for `mpctl launch --program` (docs/programs.md): it saves, resumes,
stops and says how far it is. Below plain torchrun mpctl's calls do nothing."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpctl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    saved, done = Path(os.environ.get("MPCTL_CHECKPOINT_DIR", ".")) / "last.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        done = state["step"]
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=options.lr)
    for step in range(done + 1, options.steps + 1):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(256, 16)
        loss = (replica(x) - x.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mpctl.heartbeat(step, loss=loss, tokens=256 * dist.get_world_size() * step)
        stops = torch.tensor(int(mpctl.stop_requested()))
        dist.all_reduce(stops)  # ranks see a stop one step apart, and save the same one
        if dist.get_rank() == 0 and (stops or step % 50 == 0 or step == options.steps):
            torch.save({"model": model.state_dict(), "step": step}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        if stops:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
