"""The whole cluster: three servers and two agents of the shipped manifests, in pods of real kubelets."""

import concurrent.futures
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from control_plane import Api, ControlPlane, run
from load import HostResolver, now
from nodes import (
    CLOUD, CONTROL_PLANE, EDGE_ADDRESS, EDGES, IMAGES, TAG, Network, Runtime, build_image, wait, weigh_containers,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEM = "/api/v1/namespaces/kube-system"
APPS = "/apis/apps/v1/namespaces/kube-system"
SERVERS = f"{APPS}/deployments/tunnel-server"
# One DaemonSet for each edge, which differ in --transport.
TRANSPORTS = {"edge-1": "quic", "edge-2": "h2"}
PODS = {"edge-1": "tick-1", "edge-2": "tick-2"}
# The address of the load balancer of row lb.
BALANCER = "10.77.100.200"
# The listener of an agent that leads to the API server.
LISTENER = ("127.0.0.1", 10268)
HOST_RESOLVER = "127.0.0.53"
# Lines of a followed log per second.
LINES = 2


class Programs:
    """`programs / "kubelet"` is the file of that program."""

    def __init__(self, files):
        self.files = files

    def __truediv__(self, name):
        return self.files[name]


class Cluster:
    def __init__(self, work, files, binaries, readiness):
        self.work, self.programs, self.binaries, self.readiness = work, Programs(files), binaries, readiness
        self.network = None
        # Changes of the endpoints of another Service.
        self.changes = 0
        # Whether the objects are those of the manifests, without the changes of this test.
        self.is_shipped = False
        self.started = now()

    def say(self, text):
        print(f"{now() - self.started:6.1f} s  {text}", file=sys.stderr, flush=True)

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.network:
            self.network.end()

    def start(self):
        images = self.images()
        self.network = Network(self.work)
        self.logs = PodLogs(self.network.nodes(), self.work / "pods")
        self.control = ControlPlane(self.network.cloud[0], self.programs, self.work)
        # From here on this process is on the control plane's host, as its callers are.
        self.network.cloud[0].enter()
        self.control.start()
        self.api = Api(self.control.pki)
        self.api.wait_until_up()
        self.say("control plane")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda item: self.start_node(*item, images), enumerate(self.network.nodes(), 1)))
        for node in self.network.nodes():
            wait(node.name, 90, lambda: self.is_ready(node.name))
        weigh_containers()
        self.say("nodes")
        self.label()
        self.apply()
        self.say("servers and agents")

    def images(self):
        """Builds the images without symbols, which are large."""
        images = {}
        for name in ("tunnel-server", "tunnel-agent"):
            stripped = self.work / name
            run(["strip", "-o", stripped, self.binaries / name])
            entrypoint = {"Entrypoint": [f"/{name}"], "Cmd": ["run"], "User": "65532:65532"}
            images[name] = build_image(self.work, name, {stripped: f"/{name}"}, entrypoint)
        busybox = run(["sh", "-c", "command -v busybox"]).strip()
        command = {"Cmd": ["/bin/sleep", "1000000"]}
        images["tick"] = build_image(self.work, "tick", {busybox: "/bin/sh"}, command)
        return images

    def start_node(self, number, node, images):
        is_edge = node.name in EDGES
        address = EDGE_ADDRESS if is_edge else f"10.77.100.{number}"
        runtime = Runtime(node, self.programs, address, f"10.244.{number}")
        runtime.start_containerd([images["tick"], images["tunnel-agent" if is_edge else "tunnel-server"]])
        pki = self.control.pki
        runtime.start_kubelet(pki.kubeconfig(node.name, f"/O=system:nodes/CN=system:node:{node.name}"), pki.file("ca.crt"))
        proxy = pki.kubeconfig(f"proxy-{node.name}", "/CN=system:kube-proxy")
        runtime.start_proxy(proxy, "nftables" if node.name == "edge-2" else "iptables")

    def is_ready(self, name):
        conditions = self.api.get(f"/api/v1/nodes/{name}")["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def label(self):
        control = {"node-role.kubernetes.io/control-plane": ""}
        self.api.patch(f"/api/v1/nodes/{CLOUD[0]}", {"metadata": {"labels": control}})
        for edge in EDGES:
            labels = {"openyurt.io/is-edge-worker": "true", "transport": TRANSPORTS[edge]}
            self.api.patch(f"/api/v1/nodes/{edge}", {"metadata": {"labels": labels}})

    def kubectl(self, *arguments, **options):
        environment = {**os.environ, "KUBECONFIG": str(self.control.admin)}
        return run([self.programs / "kubectl", *arguments], env=environment, **options)

    def apply(self):
        folder = self.work / "bin"
        folder.mkdir()
        (folder / "kubectl").symlink_to(self.programs / "kubectl")
        self.environment = {
            **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "KUBECONFIG": str(self.control.admin),
            "PREFIX": IMAGES, "TAG": TAG,
        }
        wait("the ServiceAccount of pods", 30, lambda: self.api.get("/api/v1/namespaces/default/serviceaccounts/default"))
        # Before the servers: one that runs takes up to a minute to load the Secret.
        run([REPOSITORY / "deploy/kubelet-certificate.sh"], env=self.environment)
        self.apply_objects(self.render("plain") + [tick(edge) for edge in EDGES])
        dns = self.api.get(f"{SYSTEM}/services/tunnel-dns")["spec"]["clusterIP"]
        self.dns = dns
        HostResolver(HOST_RESOLVER)
        self.control.resolve_with(dns, HOST_RESOLVER)
        self.wait_for_servers(120)
        self.wait_for_agents(120)
        self.wait_for_logs(90)

    def render(self, overlay, server=f"{CONTROL_PLANE}:31008"):
        """Returns the objects of an overlay with the changes of this test."""
        rendered = run([REPOSITORY / "deploy/manifests.sh", overlay], env={**self.environment, "SERVER": server})
        listed = self.kubectl("create", "--dry-run=client", "-o", "json", "-f", "-", input=rendered)
        return [edition for one in documents(listed) for edition in self.edit(one, overlay)]

    def apply_objects(self, objects):
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=document)

    def use_egress_selector(self):
        """Changes to the overlay egress-selector, with kube-apiserver's two files of the guide."""
        # The only host of the control plane again, whatever another row has labeled.
        for name in CLOUD[1:]:
            self.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": None}}})
        self.apply_objects(self.render("egress-selector"))
        self.wait_for_servers(120)
        uds = {"udsName": "/run/culvert/connect.sock"}
        selection = {"name": "cluster", "connection": {"proxyProtocol": "HTTPConnect", "transport": {"uds": uds}}}
        selector = {
            "apiVersion": "apiserver.k8s.io/v1beta1", "kind": "EgressSelectorConfiguration", "egressSelections": [selection],
        }
        file = self.work / "egress-selector.yaml"
        file.write_text(json.dumps(selector), encoding="ascii")
        self.control.node.stop("kube-apiserver")
        self.control.start_apiserver(f"--egress-selector-config-file={file}")
        self.api.wait_until_up()
        # They may dial the addresses of another overlay.
        self.restart_agents()
        self.wait_for_agents(120)
        self.wait_for_logs(90)

    def use_host_ports(self):
        """Changes to the overlay hostport, with a server on each host of the cloud, whose addresses agents dial."""
        control = {"node-role.kubernetes.io/control-plane": ""}
        for name in CLOUD:
            self.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": control}})
        # From nothing, which is faster than one server after the other.
        self.api.patch(SERVERS, {"spec": {"replicas": 0}})
        wait("the end of the servers", 90, lambda: not self.servers())
        addresses = ",".join(f"10.77.100.{number}:10262" for number in range(1, len(CLOUD) + 1))
        self.apply_objects(self.render("hostport", addresses))
        self.wait_for_servers(120)
        self.restart_agents()
        self.wait_for_agents(120)
        self.wait_for_logs(60)

    def use_load_balancer(self):
        """Makes the agents' Service a load balancer, and lets servers advertise and agents dial its address."""
        self.network.start_balancer(BALANCER, f"{CONTROL_PLANE}:31008")
        self.api.patch(f"{SYSTEM}/services/x-tunnel-server-svc", {"spec": {"type": "LoadBalancer"}})
        self.set_ip_mode("VIP")
        self.api.patch(f"{SYSTEM}/configmaps/tunnel-agent", {"data": {"server": f"{BALANCER}:10262"}})
        self.restart(SERVERS)
        self.wait_for_servers(120)
        # The next agents are not ready: kube-proxy of the edge leads them to a pod, to which the edge has no route.
        self.restart_agents()

    def set_ip_mode(self, mode):
        """Does what a cloud provider does when it has set up the load balancer."""
        status = {"loadBalancer": {"ingress": [{"ip": BALANCER, "ipMode": mode}]}}
        self.api.patch(f"{SYSTEM}/services/x-tunnel-server-svc/status", {"status": status})

    def wait_for_logs(self, limit):
        for pod in PODS.values():
            path = f"/api/v1/namespaces/default/pods/{pod}/log?tailLines=1"
            wait(f"logs of {pod}", limit, lambda: self.api.get(path))

    def edit(self, one, overlay):
        """Returns what is applied for an object of the manifests."""
        if one["kind"] == "Deployment":
            if overlay == "plain":
                one["spec"]["replicas"] = len(CLOUD)
            container = one["spec"]["template"]["spec"]["containers"][0]
            container["args"].append("--cloud-apiserver")
            if self.readiness:
                container["readinessProbe"]["httpGet"]["path"] = self.readiness
        if one["kind"] != "DaemonSet":
            return [one]
        return [daemon_set(one, transport) for transport in TRANSPORTS.values()]

    def servers(self):
        return self.pods("app.kubernetes.io%2Fcomponent%3Dserver")

    def pods(self, selector):
        return self.api.get(f"{SYSTEM}/pods?labelSelector={selector}")["items"]

    def wait_for_servers(self, limit):
        wait("servers", limit, lambda: is_rolled_out(self.api.get(SERVERS)))

    def wait_for_agents(self, limit):
        for transport in TRANSPORTS.values():
            wait(f"agent over {transport}", limit, lambda: self.is_agent_up(transport))

    def is_agent_up(self, transport):
        """Returns whether the agent of the latest template has replaced the one before it."""
        return is_daemon_set_up(self.api.get(f"{APPS}/daemonsets/tunnel-agent-{transport}"))

    def restart_agents(self):
        for transport in TRANSPORTS.values():
            self.restart(f"{APPS}/daemonsets/tunnel-agent-{transport}")

    def restart(self, path):
        """Starts a rollout, as `kubectl rollout restart` does."""
        stamp = {"kubectl.kubernetes.io/restartedAt": str(time.time())}
        self.api.patch(path, {"spec": {"template": {"metadata": {"annotations": stamp}}}})


class PodLogs(threading.Thread):
    """Keeps the logs of containers, which the kubelet removes with their pod."""

    def __init__(self, nodes, folder):
        super().__init__(daemon=True)
        self.nodes, self.folder = nodes, folder
        folder.mkdir()
        self.start()

    def run(self):
        while True:
            for node in self.nodes:
                for file in (node.folder / "pods").glob("kube-system_*/*/*.log"):
                    with contextlib.suppress(OSError):
                        (self.folder / f"{file.parts[-3].split('_')[1]}-{file.name}").hardlink_to(file)
            time.sleep(0.5)

    def lines(self, name):
        """Returns the JSON lines of pods whose names begin with this one."""
        texts = [file.read_text(errors="replace") for file in sorted(self.folder.glob(f"{name}*"))]
        lines = [line[line.find("{"):] for text in texts for line in text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def documents(text):
    """Parses JSON documents that follow each other."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        one, at = decoder.raw_decode(text, at)
        yield from one["items"] if one["kind"] == "List" else [one]


def daemon_set(shipped, transport):
    one = json.loads(json.dumps(shipped))
    one["metadata"]["name"] += f"-{transport}"
    spec = one["spec"]["template"]["spec"]
    for labels in (one["spec"]["selector"]["matchLabels"], one["spec"]["template"]["metadata"]["labels"], spec["nodeSelector"]):
        labels["transport"] = transport
    host, port = LISTENER
    spec["containers"][0]["args"] += [f"--transport={transport}", f"--cloud-listen=apiserver={host}:{port}"]
    return one


def tick(edge):
    script = f"while :; do echo tick; sleep {1 / LINES}; done"
    container = {"name": "tick", "image": f"{IMAGES}tick:{TAG}", "command": ["sh", "-c", script]}
    spec = {"nodeName": edge, "hostNetwork": True, "containers": [container], "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": PODS[edge], "namespace": "default"}, "spec": spec}


def is_rolled_out(deployment):
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    return (
        status.get("observedGeneration") == deployment["metadata"]["generation"]
        and status.get("updatedReplicas") == status.get("availableReplicas") == status.get("replicas") == wanted
    )


def is_daemon_set_up(one):
    status = one["status"]
    wanted = status["desiredNumberScheduled"]
    return (
        status.get("observedGeneration") == one["metadata"]["generation"]
        and wanted == status.get("updatedNumberScheduled") == status.get("numberAvailable") == 1
    )
