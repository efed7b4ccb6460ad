"""Launching on Kubernetes: the object that is created, and what is read of it afterwards.

    manifest.py    TrainJob (trainer.kubeflow.org/v1alpha1) or PyTorchJob (kubeflow.org/v1), as data
    submission.py  what would prevent a submission, and the submission
    kubectl.py     kubectl as a child process; its failures told apart
    jobs.py        jobs that were submitted

Every pod runs `mpctl launch --resume --run-dir RUN --on torchrun`: the pod of node 0 becomes the
supervisor and the others its node agents (docs/joining.md). Restarts, watching, checkpoints and the
summary are therefore those of every other launch; Kubernetes only starts the pods, once.

The run directory lies on a volume claim that the submitting machine and the pods see at the same
path. The same path, because job.json and the records of a run hold absolute paths that have to mean
the same to both.
"""
