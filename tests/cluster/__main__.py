"""Runs Culvert in a real cluster, and judges what its callers see while servers, agents and hosts go.

    python3 tests/cluster [--rows 1,2,9] [--readiness PATH] [--keep]

    KUBEBUILDER_ASSETS, CULVERT_TEST_KUBE   folders with the programs of Kubernetes and etcd
    CULVERT_BIN_DIR                         folder of tunnel-server and tunnel-agent; target/debug

The README next to this file says what is real, and what stands in for something. Exits with 77
where programs are missing, with 1 where a row fails.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

# The folder is one of the repository.
sys.dont_write_bytecode = True
import procedures  # noqa: E402
import result  # noqa: E402
import rows  # noqa: E402
from cluster import Cluster  # noqa: E402

KUBERNETES = [
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl",
]
TOOLS = [
    "containerd", "ctr", "runc", "busybox", "ip", "nft", "iptables", "unshare", "nsenter", "flock", "openssl",
    "strip", "ldd", "bash",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = {**rows.ROWS, **procedures.ROWS}
    parser.add_argument("--rows", default=",".join(rows.ROWS), help="names of rows [default: all but the procedures]")
    parser.add_argument("--readiness", help="path of the servers' readiness probe, instead of the manifest's")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    arguments = parser.parse_args()
    selected = arguments.rows.split(",")
    unknown = sorted(set(selected) - set(everything))
    if unknown:
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(everything)}")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    programs = find_programs(len(selected))
    binaries = Path(os.environ.get("CULVERT_BIN_DIR", "target/debug")).resolve()
    code = 0
    # Procedures follow the pages, and so begin with a cluster of their own.
    for table, known in ((rows.ROWS, rows.KNOWN), (procedures.ROWS, {})):
        chosen = {name: table[name] for name in selected if name in table}
        if chosen:
            code |= run(chosen, known, programs, binaries, arguments)
    sys.exit(code)


def run(chosen, known, programs, binaries, arguments):
    """Runs rows in a new cluster, and returns the exit code."""
    # Sockets are below it, and their paths are limited to 107 bytes.
    work = Path(tempfile.mkdtemp(prefix="culvert-cluster-", dir="/tmp"))
    code = 1
    try:
        with Cluster(work, programs, binaries, arguments.readiness) as cluster:
            code = result.run(cluster, chosen, known)
    finally:
        if arguments.keep or code:
            print(f"logs: {work}", file=sys.stderr)
        else:
            shutil.rmtree(work, ignore_errors=True)
    return code


def find_programs(count):
    """Returns a folder with links to all programs of Kubernetes, or ends with 77."""
    folders = [Path(os.environ[name]) for name in ("KUBEBUILDER_ASSETS", "CULVERT_TEST_KUBE") if os.environ.get(name)]
    found, missing = {}, [tool for tool in TOOLS if not shutil.which(tool)]
    for name in KUBERNETES:
        files = [folder / name for folder in folders if (folder / name).is_file()]
        if files:
            found[name] = files[0].resolve()
        else:
            missing.append(name)
    if os.geteuid():
        missing.append("root")
    if missing:
        print(f"cluster-test: {count} rows were skipped: needs {', '.join(missing)}; KUBEBUILDER_ASSETS and "
              "CULVERT_TEST_KUBE name the folders with the programs of Kubernetes")
        sys.exit(77)
    return found


main()
