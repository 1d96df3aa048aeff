"""Nodes as namespaces: network, container runtime, kubelet, kube-proxy.

    cloud-1 .. cloud-3   10.77.100.N on one switch; pods have networks of their own, 10.244.N.0/24
    edge-1, edge-2       192.168.33.221, both, each behind a router of its own that masquerades

An edge has a firewall of its host: what is new from outside does not come in, answers do.
"""

import contextlib
import ctypes
import json
import os
import platform
import subprocess
import tarfile
import time
from pathlib import Path

CLOUD = ["cloud-1", "cloud-2", "cloud-3"]
EDGES = ["edge-1", "edge-2"]
CONTROL_PLANE = "10.77.100.1"
EDGE_ADDRESS = "192.168.33.221"
IMAGES = "registry.invalid/"
TAG = "test"
PATIENCE = float(os.environ.get("CULVERT_TEST_PATIENCE", "1"))
CLONE_NEWNET = 0x40000000


class Node:
    """Namespaces for network, mounts and processes. They end with this process, and all in them."""

    def __init__(self, name, work):
        self.name = name
        self.folder = work / name
        self.folder.mkdir()
        # /run has the lock of iptables and the sockets of containerd's shims.
        script = "mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/log && ip link set lo up && echo ready && exec cat"
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not self.holder.stdout.readline():
            raise OSError(f"cannot create the namespaces of {name}")
        self.pid = child(self.holder.pid)
        self.processes = {}

    def inside(self):
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "--"]

    def script(self, text):
        """Runs a shell script in the namespaces, except that of processes: links name those of this one."""
        command = [word for word in self.inside() if word != "-p"] + ["sh", "-e", "-c", text]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise OSError(f"{self.name}: {ended.stderr.strip() or ended.returncode}: {text}")
        return ended.stdout

    def start(self, name, command, env=None):
        """Starts a process whose log is a file of its name."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                self.inside() + [str(word) for word in command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(env or {})},
            )

    def stop(self, name):
        process = self.processes.pop(name)
        inner = child(process.pid)
        os.kill(inner, 9)
        process.wait()

    def enter(self):
        """Moves the calling thread into the network of this node."""
        with open(f"/proc/{self.pid}/ns/net", encoding="ascii") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def end(self):
        self.holder.kill()
        self.holder.wait()
        for process in self.processes.values():
            process.wait()


def child(pid, within=10):
    end = time.monotonic() + within
    while time.monotonic() < end:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        if children:
            return int(children[0])
        time.sleep(0.02)
    raise OSError(f"process {pid} has started nothing")


class Network:
    """All nodes with their links. `fabric` is the switch of the cloud, and its routes."""

    def __init__(self, work):
        self.work = work
        self.fabric = Node("fabric", work)
        self.fabric.script("ip link add switch type bridge && ip link set switch up")
        self.cloud = [Node(name, work) for name in CLOUD]
        self.edges = [Node(name, work) for name in EDGES]
        self.routers = [Node(f"router-{number}", work) for number in (1, 2)]
        self.others = [self.fabric, *self.routers]
        for number, node in enumerate(self.cloud, 1):
            self.attach(node, f"10.77.100.{number}/24")
            routes = [
                f"ip route add 10.244.{other}.0/24 via 10.77.100.{other}"
                for other in range(1, len(self.cloud) + 1) if other != number
            ]
            # Without a default route an address of a Service is unreachable before kube-proxy's
            # rules translate it.
            default = ["ip route add default via 10.77.100.254", "echo 1 >/proc/sys/net/ipv4/ip_forward"]
            node.script("\n".join(routes + default))
        for number, (router, edge) in enumerate(zip(self.routers, self.edges), 1):
            self.attach(router, f"10.77.100.{10 + number}/24")
            router.script(
                f"ip link add lan type veth peer name eth0 netns {edge.pid}\n"
                "ip address add 192.168.33.1/24 dev lan && ip link set lan up\n"
                "echo 1 >/proc/sys/net/ipv4/ip_forward\n" + rules(ROUTER)
            )
            edge.script(
                f"ip address add {EDGE_ADDRESS}/24 dev eth0 && ip link set eth0 up\n"
                "ip route add default via 192.168.33.1\n" + rules(FIREWALL)
            )

    def attach(self, node, address):
        port = f"to-{node.name}"
        self.fabric.script(
            f"ip link add {port} type veth peer name wan netns {node.pid}\n"
            f"ip link set {port} master switch up"
        )
        node.script(f"ip address add {address} dev wan && ip link set wan up")

    def start_balancer(self, address, target):
        """Starts a load balancer that sends port 10262 to the node port of one node, as another host."""
        balancer = Node("balancer", self.work)
        self.others.append(balancer)
        self.attach(balancer, f"{address}/24")
        balancer.script("echo 1 >/proc/sys/net/ipv4/ip_forward\n" + rules(BALANCER.format(address=address, target=target)))

    def nodes(self):
        return self.cloud + self.edges

    def cut(self, node, is_cut):
        """Loses or returns a host: its cable, of which it and the others learn nothing."""
        # The port of the switch drops frames; a link that is down would be an error at once.
        verb = "add" if is_cut else "del"
        port = f"to-{node.name}"
        if verb == "add":
            text = "\n".join([
                "table bridge cut {", "  chain forward { type filter hook forward priority 0;",
                f"    iifname {port} drop", f"    oifname {port} drop", "  }", "}",
            ])
            self.fabric.script(rules(text))
        else:
            self.fabric.script("nft delete table bridge cut")

    def end(self):
        ids = containers(self.nodes())
        for node in self.nodes() + self.others:
            node.end()
        # With the namespaces all processes have ended; runc has had no time to remove their cgroups.
        for cgroup in ids:
            for folder in Path("/sys/fs/cgroup").glob(f"*/k8s.io/{cgroup}"):
                remove_cgroup(folder)
            remove_cgroup(Path("/sys/fs/cgroup/k8s.io") / cgroup)
        weigh_containers(1024, 100)
        for folder in Path("/sys/fs/cgroup").glob("*/k8s.io"):
            # Not if containers of others are in it.
            with contextlib.suppress(OSError):
                folder.rmdir()


def containers(nodes):
    tasks = "state/io.containerd.runtime.v2.task/k8s.io"
    return [folder.name for node in nodes for folder in (node.folder / tasks).glob("*")]


def weigh_containers(cgroup_v1=200000, cgroup_v2=10000):
    """Gives the containers of all nodes together more weight than one process of this machine has."""
    root = Path("/sys/fs/cgroup")
    is_unified = (root / "cgroup.controllers").exists()
    name, weight = ("k8s.io/cpu.weight", cgroup_v2) if is_unified else ("cpu/k8s.io/cpu.shares", cgroup_v1)
    # Without the right or the controller the machine has to be idle.
    with contextlib.suppress(OSError):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{weight}\n", encoding="ascii")


def remove_cgroup(folder):
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


def rules(text):
    return f"nft -f - <<'END'\n{text}\nEND\n"


ROUTER = """table ip site {
  chain postrouting {
    type nat hook postrouting priority 100;
    oifname wan masquerade
  }
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname lan oifname wan accept
  }
}"""

BALANCER = """table ip balancer {{
  chain prerouting {{
    type nat hook prerouting priority -100;
    ip daddr {address} meta l4proto {{ tcp, udp }} th dport 10262 dnat to {target}
  }}
  chain postrouting {{
    type nat hook postrouting priority 100;
    masquerade
  }}
}}"""

FIREWALL = """table inet host {
  chain input {
    type filter hook input priority 0; policy drop;
    iifname lo accept
    ct state established,related accept
  }
}"""


class Runtime:
    """containerd, kubelet and kube-proxy of one node."""

    def __init__(self, node, binaries, address, pods):
        self.node, self.binaries, self.address, self.pods = node, binaries, address, pods

    def start_containerd(self, images):
        folder = self.node.folder
        plugins = folder / "cni"
        plugins.mkdir()
        for name in ("loopback", "routed"):
            plugin = plugins / name
            plugin.write_text(PLUGIN, encoding="ascii")
            plugin.chmod(0o755)
        networks = folder / "net.d"
        networks.mkdir()
        plugin = {"type": "routed", "capabilities": {"portMappings": True}}
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]}
        (networks / "10-pods.conflist").write_text(json.dumps(network), encoding="ascii")
        config = CONTAINERD.format(folder=folder, pause=f"{IMAGES}tick:{TAG}")
        (folder / "containerd.toml").write_text(config, encoding="ascii")
        env = {"POD_NETWORK": self.pods, "POD_COUNTER": str(folder / "counter")}
        self.node.start("containerd", ["containerd", "--config", folder / "containerd.toml"], env)
        socket = folder / "containerd.sock"
        wait("containerd", 60, socket.exists)
        for image in images:
            self.node.script(f"ctr -a {socket} -n k8s.io images import {image} >/dev/null")

    def start_kubelet(self, kubeconfig, ca):
        folder = self.node.folder
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False}, "webhook": {"enabled": False}, "x509": {"clientCAFile": str(ca)},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupsPerQOS": False,
            "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
            "enforceNodeAllocatable": [],
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%"},
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "podLogsDir": str(folder / "pods"),
            "resolvConf": "",
            "volumePluginDir": str(folder / "plugins"),
        }
        (folder / "kubelet.yaml").write_text(json.dumps(config), encoding="ascii")
        self.node.start("kubelet", [
            self.binaries / "kubelet", f"--config={folder}/kubelet.yaml", f"--kubeconfig={kubeconfig}",
            f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/certificates",
            f"--hostname-override={self.node.name}", f"--node-ip={self.address}",
        ])

    def start_proxy(self, kubeconfig, mode):
        self.node.start("kube-proxy", [
            self.binaries / "kube-proxy", f"--kubeconfig={kubeconfig}", f"--hostname-override={self.node.name}",
            f"--proxy-mode={mode}", "--cluster-cidr=10.244.0.0/16",
            # These are values of the whole machine.
            "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
        ])


CONTAINERD = """version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{folder}/net.d"
bin_dir = "{folder}/cni"
"""

# A network plugin: an address and a route for each pod, without a bridge, and its host ports.
PLUGIN = r"""#!/bin/sh
set -e
table="pod-$(echo "$CNI_CONTAINERID" | cut -c1-12)"
[ "$CNI_COMMAND" != DEL ] || nft delete table ip "$table" 2>/dev/null || true
[ "$CNI_COMMAND" = ADD ] || { [ "$CNI_COMMAND" != VERSION ] || echo '{"cniVersion":"0.4.0","supportedVersions":["0.4.0"]}'; exit 0; }
pod() { nsenter --net="$CNI_NETNS" -- "$@"; }
if [ "${0##*/}" = loopback ]; then
  pod ip link set lo up
  echo '{"cniVersion":"0.4.0"}'
  exit 0
fi
number=$(flock "$POD_COUNTER" sh -c 'n=$(cat "$1"); n=$((${n:-1} + 1)); echo $n >"$1"; echo $n' sh "$POD_COUNTER")
address=$POD_NETWORK.$number
ip link add "pod$number" type veth peer name "$CNI_IFNAME" netns "$CNI_NETNS"
pod ip address add "$address/32" dev "$CNI_IFNAME"
pod ip link set "$CNI_IFNAME" up
pod ip route add 169.254.1.1 dev "$CNI_IFNAME"
pod ip route add default via 169.254.1.1
echo 1 >"/proc/sys/net/ipv4/conf/pod$number/proxy_arp"
ip link set "pod$number" up
ip route add "$address" dev "pod$number"
ports=$(grep -o '"HostPort":[0-9]*,"ContainerPort":[0-9]*,"Protocol":"[a-z]*"' |
  sed -E 's/[^:]*:([0-9]+),[^:]*:([0-9]+),[^:]*:"([a-z]*)"/\1,\2,\3/' || true)
if [ -n "$ports" ]; then
  nft add table ip "$table"
  nft "add chain ip $table ports { type nat hook prerouting priority -110; }"
  for port in $ports; do
    IFS=, read -r outside inside protocol <<END
$port
END
    nft add rule ip "$table" ports fib daddr type local "$protocol" dport "$outside" dnat to "$address:$inside"
  done
fi
echo '{"cniVersion":"0.4.0","interfaces":[{"name":"'$CNI_IFNAME'","sandbox":"'$CNI_NETNS'"}],"ips":[{"version":"4","address":"'$address'/32","interface":0}]}'
"""


def build_image(work, name, files, entrypoint):
    """Writes an image with these files (from host to path) and the libraries that they need."""
    folder = work / f"image-{name}"
    folder.mkdir()
    layer = folder / "layer.tar"
    with tarfile.open(layer, "w") as tar:
        for directory in ("tmp", "var/lib/tunnel-server", "var/lib/tunnel-agent"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o1777, 65532, 65532
            tar.addfile(entry)
        seen = set()
        for source, target in files.items():
            tar.add(os.path.realpath(source), target.lstrip("/"))
            for library in libraries(source):
                if library not in seen:
                    seen.add(library)
                    tar.add(os.path.realpath(library), library.lstrip("/"))
        for link in ("sleep", "echo", "cat"):
            if "/bin/sh" in files.values():
                entry = tarfile.TarInfo(f"bin/{link}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "sh"
                tar.addfile(entry)
    digest = subprocess.run(["sha256sum", layer], capture_output=True, text=True, check=True).stdout.split()[0]
    machine = {"aarch64": "arm64"}.get(platform.machine(), "amd64")
    config = {
        "architecture": machine, "os": "linux", "config": entrypoint,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="ascii")
    manifest = [{"Config": "config.json", "RepoTags": [f"{IMAGES}{name}:{TAG}"], "Layers": ["layer.tar"]}]
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="ascii")
    image = work / f"{name}.tar"
    with tarfile.open(image, "w") as tar:
        for file in ("manifest.json", "config.json", "layer.tar"):
            tar.add(folder / file, file)
    return image


def libraries(program):
    ended = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    words = [word for line in ended.stdout.splitlines() for word in line.split()]
    return [word for word in words if word.startswith("/")] if not ended.returncode else []


def wait(what, limit, condition):
    """Waits until a condition holds. Its exceptions count as false until the limit."""
    end = time.monotonic() + limit * PATIENCE
    problem = None
    while time.monotonic() < end:
        try:
            value = condition()
            if value:
                return value
        except (OSError, KeyError, ValueError, AssertionError) as error:
            problem = error
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {limit} s ({problem})")
