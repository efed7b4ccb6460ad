"""The files of a run directory: their names, formats, writers and readers, all without torch.

| file | written by | format |
|---|---|---|
| .mpctl-run | launcher, first of all | marker.py: the directory was written by a launch |
| job.json | launcher | the job with all defaults filled in (spec/job.py) |
| plan.json | launcher | the plan, schema mpctl.plan/2 |
| data/ | launcher | the tokenized corpus, when the job names text files (train/data/manifest.py) |
| launcher.json | launcher, before it starts ranks | launcher.py: schema mpctl.launcher/1 |
| slurm.sh | launcher, launch.slurm | run/clusters/slurm/script.py: the batch script as submitted |
| kubernetes.yaml | launcher, `--on kubernetes --submit` | the object that was created |
| nodes/meeting.json | launcher, in a world that others started | run/clusters/torchrun/meeting.py |
| nodes/hosts.json | launcher, at each attempt | launcher.py: the host of every rank |
| nodes/blamed.json | launcher, after a failure | blamed.py: failures by the host at fault |
| nodes/lost | launcher, `--on slurm`, at its end | why hosts could not be used, for slurm.sh |
| nodes/excluded | launcher, `--on slurm`, at its end | hosts that a requeue leaves out |
| nodes/ssh-N.log | ssh of node N | output of ssh and the node agent (run/clusters/ssh/backend.py) |
| stop-request | `mpctl stop` | launcher.py: asks the launcher to stop the run |
| nodes/status.json | launcher | run/launch/attempt.py: state of all ranks, and why they failed |
| logs/launcher.log | launcher | its messages during the run, with times |
| logs/torchrun.log | torchrun | its command line and output, one section an attempt |
| logs/slurm-J.out | batch script | what the launcher printed in Slurm's job J |
| logs/rank-N.log | rank N | everything the rank prints |
| logs/nccl_trace_rank_N | rank N | its last collectives, where one timed out on NCCL |
| bench.json | launcher, of a bench | what the ranks are to measure |
| answers.jsonl | rank 0, of a bench | the results, one JSON object a line |
| metrics.jsonl | rank 0, or the launcher | metrics.py: one record a step (rank_files.py) |
| slow.jsonl | launcher | slow.py: ranks and links that held up the run |
| metrics.csv | launcher, launch.csv | metrics.py: the same records as a table |
| tensorboard/ | launcher, launch.tensorboard | metrics.py: the same as TensorBoard events |
| checkpoints/step-N/ | all ranks | checkpoints.py: tensors and manifest |
| profile/rank-N.jsonl | rank N, launch.profile | profile_files.py: the times of its work |
| ranks/rank-N.json | rank N, at its end | rank_files.py: RankReport |
| program/ | launch.program | heartbeat.py: its heartbeats, stops; its own checkpoints/ |
| summary.json | launcher, at the end | summary.py: schema mpctl.run/2 |

directory.py has the paths, the lock and the life cycle of the directory. The live state of an
attempt is in none of these: docs/design/launch.md has a table of its ways. breadcrumb.py,
collective_log.py and step_log.py are the memory that a rank shares with its host. requests.py and
rank_files.py also define what other short-lived workers (`mpctl eval`, `mpctl sample`, `mpctl
launch --rehearse`) report to the command that started them.
"""
