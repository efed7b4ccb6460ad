"""Launching on Kubernetes: creating the object of a run, and reading its state.

    manifest.py    TrainJob (trainer.kubeflow.org/v1alpha1) or PyTorchJob (kubeflow.org/v1), as data
    submission.py  what would prevent a submission, and the submission
    kubectl.py     kubectl as a child process; the kinds of its failures
    jobs.py        jobs that were submitted

Every pod runs `mpctl launch --resume --run-dir RUN --on torchrun`: the pod of node 0 becomes the
supervisor and the others its node agents (docs/joining.md). Restarts, hang detection, checkpoints
and the summary are therefore those of every other launch; Kubernetes only starts the pods, once.

The run directory is on a volume claim that the submitting machine and the pods mount at the same
path, because job.json and the records of a run hold absolute paths.
"""
