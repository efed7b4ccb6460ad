"""Everything that assumes that all ranks run on the host of the launcher.

    machine.py     cores, GPUs and free memory of this host (cgroup.py: its memory limit)
    host.py        whether they suffice for a plan, and whether the ranks can reach each other
    address.py     where they meet: a free port of the loopback address
    torchrun.py    the environment of a rank, the command that starts all ranks, one attempt
    processes.py   the processes of an attempt: their states, and their end

The other files of launch/ do not start, look at or end a process of a rank, and know no address:
they plan a launch, prepare the run directory, follow the files that ranks write there, judge what a
failed attempt left behind and write the summary. What they use of this folder is `rank_environment`
and `torchrun_command` (LaunchPlan), `Attempt` (supervise.py, watch.py), the checks of host.py
(preflight.py), and `task_environments` for the workers of `mpctl eval` and `mpctl sample`.

A launch by Slurm, ssh or Kubernetes would be a folder beside this one with the same parts, chosen
where LaunchPlan and supervise.py import from here. Beyond the processes it needs a run directory
that all hosts share: metrics, breadcrumbs, failures and the request to stop are files in it.
"""
