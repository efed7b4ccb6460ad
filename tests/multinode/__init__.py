"""Training over several nodes on real parts: Slurm, sshd, network namespaces, all on this machine.

Run by `make test-clusters`, as root, which installs missing programs by apt. Elsewhere these tests
are skipped, and counted with the reason. Each test file says what it needs:

    pytestmark = pytest.mark.cluster("slurm")

needs.py has the table of such needs. A fixture brings its part up in a scratch folder and takes it
down again; it ends only processes that it started itself (daemons.py).
"""
