"""Rows of procedures: the commands of the how-to pages as printed, with the names of this cluster."""

import json
import re
import subprocess
import time

from cluster import APPS, EDGES, LISTENER, PODS, REPOSITORY, SERVERS, SYSTEM, TRANSPORTS
from load import Calls, Repeated, dial_listener, execute, now
from nodes import CONTROL_PLANE, IMAGES, TAG, rules, wait
from result import Result

GUIDES = REPOSITORY / "docs/how-to"
NEXT_TAG = f"{TAG}-next"
# Certificates of this lifetime are renewed after 24 to 36 s, and `--next` is allowed after as many.
LIFE = 60
# Until the kubelet has replaced its copy of ConfigMap tunnel-ca (90 s), and the agent's waits of one and two minutes.
BACK = 300
# Drops new connections from an edge to the API server that do not pass the tunnel.
DIRECT = """table ip direct {
  chain output {
    type filter hook output priority 0;
    tcp dport 6443 ct state new drop
  }
}"""


class Shell:
    """Runs commands of a page on a machine with kubectl and a clone. `tunnel-server` is that of a pod."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.names = {"registry.example.com/culvert/": IMAGES, "worker-1": "edge-1"}

    def run(self, text, pod=None, fails=False, **names):
        for printed, here in {**self.names, **names}.items():
            text = text.replace(printed, here)
        pod = pod or servers_now(self.cluster)[0]
        prologue = (
            f'set -euo pipefail; cd "{REPOSITORY}"\n'
            f'tunnel-server() {{ kubectl -n kube-system exec {pod} -- /tunnel-server "$@"; }}\n'
        )
        environment = {key: value for key, value in self.cluster.environment.items() if key not in ("PREFIX", "TAG")}
        ended = subprocess.run(
            ["bash", "-c", prologue + text], env=environment, capture_output=True, text=True, check=False,
        )
        if bool(ended.returncode) != fails:
            raise OSError(f"{text.strip()}: {ended.returncode}: {ended.stdout.strip()} {ended.stderr.strip()}")
        return (ended.stdout + ended.stderr).strip()


def servers_now(cluster):
    """Returns the names of the servers, without those that drain."""
    return [pod["metadata"]["name"] for pod in cluster.servers() if "deletionTimestamp" not in pod["metadata"]]


def blocks(page, heading):
    """Returns the blocks of commands of a section."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", re.sub(r"^```.*?^```$", lambda found: found[0].replace("\n#", "\n\0#"), section,
                                        flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE)[0]
    found = re.findall(r"^ *```sh [^\n]*\n(.*?)^ *```$", section.replace("\0", ""), re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"no commands below {heading} in {page}")
    return found


def prepared(cluster):
    """Returns a shell for a cluster whose objects are those of the manifests, with one DaemonSet."""
    shell = Shell(cluster)
    if cluster.is_shipped:
        return shell
    cluster.is_shipped = True
    for node in cluster.network.nodes():
        image = f"{IMAGES}{'tunnel-agent' if node.name in EDGES else 'tunnel-server'}"
        node.script(f"ctr -a {node.folder}/containerd.sock -n k8s.io images tag {image}:{TAG} {image}:{NEXT_TAG} >/dev/null")
    for transport in TRANSPORTS.values():
        cluster.api.request("DELETE", f"{APPS}/daemonsets/tunnel-agent-{transport}")
    wait("the end of the agents", 90, lambda: not cluster.pods("app.kubernetes.io%2Fcomponent%3Dagent"))
    apply_manifests(shell, TAG)
    cluster.wait_for_servers(180)
    wait_for_agents(cluster)
    cluster.wait_for_logs(90)
    return shell


def apply_manifests(shell, tag):
    """Runs action 2 of the tutorial, which kubectl may refuse where this test owns a field."""
    text = (REPOSITORY / "docs/tutorials/cluster.md").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if "deploy/manifests.sh | kubectl apply" in line)
    command = command.replace("--server-side", "--server-side --force-conflicts")
    shell.run(command, **{"TAG=0.1.0": f"TAG={tag}", "cloud.example.com": CONTROL_PLANE})


def wait_for_agents(cluster, limit=240):
    path = f"{APPS}/daemonsets/tunnel-agent"

    def is_up():
        one = cluster.api.get(path)
        status = one["status"]
        return (
            status.get("observedGeneration") == one["metadata"]["generation"]
            and status.get("updatedNumberScheduled") == status.get("numberAvailable") == len(EDGES)
        )

    wait("agents", limit, is_up)


def served(cluster, edge, limit):
    """Waits until a node is reached, and returns after how many seconds."""
    began = now()
    wait(f"logs of {PODS[edge]}", limit, lambda: cluster.api.get(f"/api/v1/namespaces/default/pods/{PODS[edge]}/log?tailLines=1"))
    return now() - began


def upgrade(cluster):
    """upgrade: the manifests of another version, applied as the first ones, under calls."""
    shell = prepared(cluster)
    calls = {edge: Calls(cluster.api, PODS[edge]) for edge in EDGES}
    time.sleep(3)
    began = now()
    apply_manifests(shell, NEXT_TAG)
    cluster.wait_for_servers(240)
    wait_for_agents(cluster)
    took = now() - began
    time.sleep(5)
    results = []
    for edge in EDGES:
        result = Result(f"upgrade.md, {edge}", "quic", "at most 3 s without service")
        result.count(calls[edge].stop())
        result.notes.append(f"{result.away:.1f} s without service; new servers and agents after {took:.0f} s")
        result.expect(result.away <= 3.1, "no service")
        results.append(result)
    pods = cluster.pods("app.kubernetes.io%2Fpart-of%3Dculvert")
    images = {pod["spec"]["containers"][0]["image"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}
    results[0].expect(all(image.endswith(NEXT_TAG) for image in images), f"images {images}")
    return results


def edge_apiserver(cluster):
    """edge-apiserver: the API server from a node, by the listener, a kubeconfig, and the rules for pods."""
    prepared(cluster)
    result = Result("edge-apiserver.md", "quic", "the API server answers in each way")
    add = {"op": "add", "path": "/spec/template/spec/containers/0/args/-"}
    for path, arguments in (
        (SERVERS, ["--cloud-apiserver"]),
        (f"{APPS}/daemonsets/tunnel-agent",
         ["--cloud-listen=apiserver=127.0.0.1:10268", "--cloud-listen=apiserver=169.254.2.1:10268"]),
    ):
        cluster.api.request("PATCH", path, [{**add, "value": value} for value in arguments], "application/json-patch+json")
    cluster.wait_for_servers(240)
    wait_for_agents(cluster)
    edge = cluster.network.edges[0]
    check = blocks("edge-apiserver.md", "Server and agent")[0]
    wait("the API server at the listener", 30, lambda: '"gitVersion"' in edge.script(check))
    # The folder of the page has the files that it renders.
    folder = cluster.work / "edge-apiserver"
    folder.mkdir()
    agent = folder / "tunnel-agent"
    agent.symlink_to(cluster.binaries / "tunnel-agent")
    rendered = blocks("edge-apiserver.md", "Clients")[0]
    edge.script(f"cd {folder}; PATH={folder}:$PATH\n{rendered}")
    kubeconfig = folder / "kubeconfig"
    config = json.loads(cluster.control.admin.read_text(encoding="ascii"))
    config["clusters"][0]["name"] = config["contexts"][0]["context"]["cluster"] = "kubernetes"
    kubeconfig.write_text(json.dumps(config), encoding="ascii")
    change = blocks("edge-apiserver.md", "The kubelet and kubeconfigs")[0]
    kubectl = cluster.programs / "kubectl"
    nodes = edge.script(f"export KUBECONFIG={kubeconfig} HOME={folder}; kubectl() {{ {kubectl} \"$@\"; }}\n{change}\nkubectl get nodes -o name")
    result.expect("node/edge-1" in nodes, f"kubectl printed {nodes}")
    # What `culvert-edge-apiserver.service` runs, without systemd.
    edge.script(f"cd {folder}\nip address replace 169.254.2.1/32 dev lo scope host\nnft -f edge-apiserver.nft")
    # kube-proxy of the edge leads the address to the API server, too: no connection may begin that way.
    edge.script(rules(DIRECT))
    dials = Repeated(lambda: dial_listener(("10.96.0.1", 443), cluster.control.pki), 5, enter=edge.enter)
    time.sleep(15)
    outcomes = dials.stop()
    # The agent looks for the address every 10 s.
    result.count([outcome for outcome in outcomes if outcome.began > outcomes[0].began + 11])
    result.expect(not result.failed, "pods did not reach the API server")
    edge.script("nft delete table ip direct")
    edge.script("nft delete table ip culvert_edge_apiserver\nip address del 169.254.2.1/32 dev lo")
    listener = Repeated(lambda: dial_listener(LISTENER, cluster.control.pki), 5, enter=edge.enter)
    time.sleep(3)
    result.expect(not any(outcome.error for outcome in listener.stop()), "the listener ended with the rules")
    return [result]


def revoke(cluster):
    """revoke: a node is locked out, admitted, reissued; a token is revoked."""
    shell = prepared(cluster)
    result = Result("revoke.md", "quic", "out at once, also with a new pod; back after unrevoke, and after reissue")
    agents = "app.kubernetes.io%2Fcomponent%3Dagent"

    def agent():
        pods = [pod for pod in cluster.pods(agents) if pod["spec"].get("nodeName") == "edge-1"]
        return next((pod for pod in pods if "deletionTimestamp" not in pod["metadata"]), None)

    def is_next(pod, name):
        return pod and pod["metadata"]["name"] != name and pod["status"]["phase"] == "Running"

    def is_reached():
        cluster.api.get(f"/api/v1/namespaces/default/pods/{PODS['edge-1']}/log?tailLines=1")
        return True

    def is_away():
        try:
            return not is_reached()
        except OSError:
            return True

    served(cluster, "edge-1", 60)
    printed = shell.run(blocks("revoke.md", "Lock out a stolen or compromised edge")[0])
    result.notes.append(printed.replace("\n", " / "))
    began = now()
    wait("the end of the node", 30, is_away)
    result.notes.append(f"refused after {now() - began:.1f} s")
    old = agent()["metadata"]["name"]
    cluster.api.request("DELETE", f"{SYSTEM}/pods/{old}")
    wait("a new pod", 90, lambda: is_next(agent(), old))
    refused = Repeated(is_reached, 2)
    time.sleep(20)
    result.expect(all(outcome.error for outcome in refused.stop()), "a new pod was admitted")
    for pod in servers_now(cluster):
        listed = shell.run("tunnel-server nodes revocations", pod)
        result.expect("edge-1" in listed, f"{pod} lists {listed}")
    shell.run(blocks("revoke.md", "End a revocation")[0])
    # The pod that was started meanwhile waits in CrashLoopBackOff.
    cluster.api.request("DELETE", f"{SYSTEM}/pods/{agent()['metadata']['name']}")
    result.notes.append(f"back {served(cluster, 'edge-1', 90):.0f} s after unrevoke and a new pod")
    printed = shell.run(blocks("revoke.md", "End the certificates of a node, and admit it again")[0])
    wait("the end of the node", 30, is_away)
    # A running pod of the DaemonSet has a later token within 48 minutes, a new one at once.
    cluster.api.request("DELETE", f"{SYSTEM}/pods/{agent()['metadata']['name']}")
    result.notes.append(f"back {served(cluster, 'edge-1', 180):.0f} s after reissue and a new pod")
    token = printed.split()[-1]
    listed = shell.run("tunnel-server token list")
    identifier = next(line.split()[0] for line in listed.splitlines() if "edge-1" in line)
    shell.run(f"ID={identifier}\n" + blocks("revoke.md", "A leaked token")[0])
    listed = shell.run("tunnel-server token list")
    states = [line for line in listed.splitlines() if identifier in line]
    result.expect(all("revoked" in line for line in states), f"the token is listed as {states}")
    result.expect(token, "no token was printed")
    return [result]


def servers(cluster):
    """servers: the Services prefer a caller's host; a load balancer; a server on each host."""
    shell = prepared(cluster)
    results = []
    result = Result("servers.md, PreferSameNode", "quic", "the Services have it, and execs go on")
    shell.run(blocks("servers.md", "When a host is lost")[0])
    expect_same_node(cluster, result)
    calls = Repeated(lambda: execute(cluster.api, PODS["edge-1"]), 2)
    time.sleep(10)
    result.count(calls.stop())
    result.expect(not result.failed, "execs failed")
    results.append(result)

    result = Result("servers.md, hostport", "quic", "servers on the hosts, agents connected")
    control = {"node-role.kubernetes.io/control-plane": ""}
    for node in cluster.network.cloud:
        cluster.api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"labels": control}})
    hosts = ",".join(f"10.77.100.{number}:10262" for number in (1, 2, 3))
    command = blocks("servers.md", "A server on each host of the control plane")[0]
    printed = shell.run(command, **{
        "192.0.2.11:10262,192.0.2.12:10262,192.0.2.13:10262": hosts, "TAG=0.1.0": f"TAG={NEXT_TAG}",
        "--server-side": "--server-side --force-conflicts",
    })
    result.expect("serverside-applied" in printed, printed)
    expect_same_node(cluster, result)
    cluster.wait_for_servers(300)
    wait_for_agents(cluster)
    for edge in EDGES:
        result.notes.append(f"logs of {edge} {served(cluster, edge, 120):.0f} s after the last server")
    results.append(result)
    return results


def expect_same_node(cluster, result):
    for service in ("x-tunnel-server-internal-svc", "tunnel-dns"):
        found = cluster.api.get(f"{SYSTEM}/services/{service}")["spec"].get("trafficDistribution")
        result.expect(found == "PreferSameNode", f"{service} has {found}")


def replace_ca(cluster):
    """ca: the CA is replaced three times under 40 calls/s while one agent is partitioned, then at once."""
    shell = prepared(cluster)
    cluster.api.patch(SERVERS, {"spec": {"replicas": 3}})
    shorten_life(cluster)
    near, away = "edge-1", "edge-2"
    router = cluster.network.routers[1]
    for edge in EDGES:
        served(cluster, edge, 120)
    calls = Calls(cluster.api, PODS[near], 40)
    cluster.network.cut(router, True)
    result = Result("replace-ca.md, 3 times, an agent partitioned", "quic", "0 failed; the verb names who is left behind")
    began = now()
    for pod in servers_now(cluster):
        first, second, last = blocks("replace-ca.md", "Outside a cluster")
        steps = [first, second.splitlines()[1], last]
        said = ""
        for step in steps:
            said += shell_until(shell, step, pod)
        cluster.say(f"rotated at {pod}")
        # Each server counts the agents of all.
        told = [line for line in said.splitlines() if line.startswith(("left behind", "not counted"))]
        result.notes += [f"at {pod}: {line}" for line in told]
        result.expect(told, f"{pod} says nothing of agents that are left behind")
        listed = shell.run("tunnel-server nodes", pod)
        line = next((line for line in listed.splitlines() if line.startswith(away)), "")
        result.expect("away" in line, f"{pod} lists {line!r} for {away}")
    result.count(calls.stop())
    result.notes.append(f"three rotations in {now() - began:.0f} s")
    result.expect(not result.failed, "calls failed")
    cluster.network.cut(router, False)
    result.notes.append(f"{away} was back {served(cluster, away, BACK):.0f} s after its way back was free")

    new = Result("replace-ca.md, a new CA", "quic", "all agents are back by themselves")
    shell.run(blocks("replace-ca.md", "Start with a new CA")[0])
    cluster.wait_for_servers(180)
    began = now()
    for edge in EDGES:
        served(cluster, edge, BACK)
    new.notes.append(f"all agents are back {now() - began:.0f} s after the servers")
    return [result, new]


def shell_until(shell, command, pod, limit=180):
    """Runs a command until it is not refused, as the page says, and returns what it printed."""
    printed = []

    def accepted():
        printed[:] = [shell.run(command, pod)]
        return True

    wait(command, limit, accepted)
    return printed[0] + "\n"


def shorten_life(cluster):
    """Gives servers a file with a short lifetime of certificates, and starts servers and agents anew."""
    data = {"server.yaml": f"limits: {{ certificateLife: {LIFE}s }}\n"}
    limits = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tunnel-limits"}, "data": data}
    cluster.api.request("POST", f"{SYSTEM}/configmaps", limits)
    container = "/spec/template/spec/containers/0"
    patch = [
        {"op": "add", "path": f"{container}/args/-", "value": "--config=/etc/limits/server.yaml"},
        {"op": "add", "path": f"{container}/volumeMounts/-", "value": {"name": "limits", "mountPath": "/etc/limits"}},
        {"op": "add", "path": "/spec/template/spec/volumes/-", "value": {"name": "limits", "configMap": {"name": "tunnel-limits"}}},
    ]
    cluster.api.request("PATCH", SERVERS, patch, "application/json-patch+json")
    cluster.wait_for_servers(240)
    cluster.restart(f"{APPS}/daemonsets/tunnel-agent")
    wait_for_agents(cluster)
    # These servers know the agents by their earlier certificates, for which a rotation would wait.
    cluster.restart(SERVERS)
    cluster.wait_for_servers(240)


ROWS = {
    "upgrade": upgrade,
    "edge-apiserver": edge_apiserver,
    "revoke": revoke,
    "replace-ca": replace_ca,
    # Last: it changes how agents dial.
    "servers": servers,
}
