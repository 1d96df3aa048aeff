"""Makes the templates of the chart from rendered overlays.

The overlay `plain` is the default. Each other overlay, and each feature that can be off, is a
variant: the objects that it would have, with the condition on the values that selects it. Where a
variant differs from `plain`, the template has both, in an `if`. Values that replace a single field
are in `fields`, and those that add to one are in `HOOKS`.

Uses the standard library only: `parse` reads what kubectl prints, which is a subset of YAML.
"""

import copy
import glob
import json
import os
import re
import sys

NAMESPACE = "{{ .Release.Namespace }}"
PLACEHOLDER = "the address in ConfigMap tunnel-agent is not set"
EDGE_LABEL = "openyurt.io/is-edge-worker"
MISSING = object()


class Template(str):
    """Text of a template, written as it is."""


# Reading.


def parse(text):
    """Returns the documents of a file, keyed by kind and name."""
    found = {}
    for document in re.split(r"^---\n", text, flags=re.M):
        lines = [line for line in document.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if lines:
            document = parse_block(lines, 0)
            found[document["kind"], document["metadata"]["name"]] = document
    return found


def indent_of(line):
    return len(line) - len(line.lstrip())


def parse_block(lines, indent):
    """Takes the lines of one mapping or sequence off the list, and returns its value."""
    if lines[0].lstrip().startswith("- "):
        items = []
        while lines and indent_of(lines[0]) == indent and lines[0].lstrip().startswith("- "):
            lines[0] = " " * (indent + 2) + lines[0][indent + 2 :]
            if re.match(r"\s*(\"[^\"]*\"|[^\s\"'\[{][^\s]*):( |$)", lines[0]):
                items.append(parse_block(lines, indent + 2))
            else:
                items.append(scalar(lines.pop(0).strip()))
        return items
    entries = {}
    while lines and indent_of(lines[0]) == indent and not lines[0].lstrip().startswith("- "):
        key, value = re.match(r"\s*(\"[^\"]*\"|[^\s]+?):(?: (.*))?$", lines.pop(0)).groups()
        if value is not None:
            entries[scalar(key)] = scalar(value)
        elif lines and (indent_of(lines[0]) > indent or lines[0].lstrip().startswith("- ")):
            entries[scalar(key)] = parse_block(lines, indent_of(lines[0]))
        else:
            entries[scalar(key)] = None
    return entries


def scalar(text):
    if text[0] in "\"[{" or re.fullmatch(r"-?\d+|true|false|null", text):
        return json.loads(text)
    if text[0] == "'":
        return text[1:-1].replace("''", "'")
    if text[0] in "|>&*!%@`":
        raise ValueError(f"not in the subset: {text}")
    return text


# Writing.


def written(value):
    if isinstance(value, Template):
        return str(value)
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", value):
        if value.lower() not in ("true", "false", "null", "yes", "no", "on", "off", "y", "n"):
            return value
    return json.dumps(value)


def any_of(conditions):
    conditions = list(dict.fromkeys(conditions))
    return conditions[0] if len(conditions) == 1 else "or " + " ".join(f"({condition})" if " " in condition else condition for condition in conditions)


def none_of(conditions):
    condition = any_of(conditions)
    if condition.startswith("not "):
        return condition[len("not ") :]
    return f"not {condition}" if " " not in condition else f"not ({condition})"


def wrapped(condition, lines):
    return ["{{- if " + condition + " }}", *lines, "{{- end }}"] if lines else []


def entry(key, base, variants, indent, path):
    """Returns the lines of one entry of a mapping. A `key` of None is an item of a sequence."""
    path = path if key is None else (*path, key)
    others = [(condition, value) for condition, value in variants if value is MISSING or value != base]
    if base is MISSING:
        return choice(key, [other for other in others if other[1] is not MISSING], MISSING, indent, path)
    removed = [condition for condition, value in others if value is MISSING]
    changed = [(condition, value) for condition, value in others if value is not MISSING]
    is_container = isinstance(base, (dict, list)) and all(type(value) is type(base) for _, value in changed)
    if changed and not is_container:
        return choice(key, others, base, indent, path)
    lines = single(key, base, changed, indent, path)
    return wrapped(none_of(removed), lines) if removed else lines


def choice(key, others, base, indent, path):
    """Returns one entry for each different value, of which one is selected."""
    groups = []
    for condition, value in others:
        group = next((group for group in groups if group[1] is value or group[1] == value), None)
        if group:
            group[0].append(condition)
        else:
            groups.append(([condition], value))
    lines = []
    for conditions, value in groups:
        word = "else if" if lines else "if"
        lines.append("{{- " + word + " " + any_of(conditions) + " }}")
        lines += [] if value is MISSING else single(key, value, [], indent, path)
    if base is not MISSING:
        lines += ["{{- else }}", *single(key, base, [], indent, path)]
    return [*lines, "{{- end }}"] if groups else []


def single(key, base, variants, indent, path):
    """Returns the lines of a value that all variants have, perhaps with other content."""
    lead = " " * indent + ("-" if key is None else written(key) + ":")
    if not isinstance(base, (dict, list)) or not base:
        return [f"{lead} {written(base)}"]
    if isinstance(base, list):
        body = sequence(base, variants, indent if key is not None else indent + 2, path)
        inner = indent
    else:
        inner = indent + 2
        body = mapping(base, variants, inner, path)
    body = hooked(path, body, inner)
    if key is None and not body[0].lstrip().startswith("{{"):
        return [f"{lead} {body[0].lstrip()}", *body[1:]]
    return [lead, *body]


def hooked(path, body, indent):
    before, after = HOOKS.get(path, ([], []))
    pad = lambda lines: [line.replace("INDENT", str(indent)).replace("PAD", " " * indent) for line in lines]
    return [*pad(before), *body, *pad(after)]


def mapping(base, variants, indent, path):
    keys = sorted(set(base).union(*(value for _, value in variants)))
    # An item of a sequence begins with an entry that is always there.
    is_same = lambda key: key in base and all(value.get(key, MISSING) == base[key] for _, value in variants)
    keys.sort(key=lambda key: not is_same(key))
    lines = []
    for key in keys:
        values = [(condition, value.get(key, MISSING)) for condition, value in variants]
        lines += entry(key, base.get(key, MISSING), values, indent, path)
    return lines


def names_of(items):
    """Returns what identifies each item: its name, a flag, or the whole item."""
    names = []
    for item in items:
        if isinstance(item, dict):
            names.append(item.get("name") or json.dumps(item, sort_keys=True))
        else:
            names.append(item.split("=")[0] if isinstance(item, str) and not isinstance(item, Template) else item)
    return names


def sequence(base, variants, indent, path):
    is_named = all(isinstance(item, str) or "name" in item for item in base)
    if not is_named and all(len(value) == len(base) for _, value in variants):
        # The items at one index are the same item.
        names = [str(index) for index in range(len(base))]
        variants = [(condition, dict(zip(names, value))) for condition, value in variants]
    else:
        names = names_of(base)
        variants = [(condition, dict(zip(names_of(value), value))) for condition, value in variants]
    lines = added(None, names, variants, indent, path)
    for name, item in zip(names, base):
        values = [(condition, value.get(name, MISSING)) for condition, value in variants]
        lines += entry(None, item, values, indent, (*path, name))
        lines += added(name, names, variants, indent, path)
    return lines


def added(previous, names, variants, indent, path):
    """Returns the items that variants have after `previous`, and that `names` does not have."""
    found, order = {}, []
    for condition, value in variants:
        after, new = None, []
        for name, item in value.items():
            if name in names:
                after = name
            elif after == previous:
                found.setdefault(name, []).append((condition, item))
                new.append(name)
        # In the order of each variant: before the next item that another variant has as well.
        for index, name in enumerate(new):
            if name not in order:
                following = (order.index(other) for other in new[index:] if other in order)
                order.insert(next(following, len(order)), name)
    lines = []
    for name in order:
        lines += entry(None, MISSING, found[name], indent, (*path, name))
    return lines


# What the values change.

SERVER = ("Deployment", "tunnel-server")
AGENT = ("DaemonSet", "tunnel-agent")
AGENTS_SERVICE = ("Service", "x-tunnel-server-svc")
TOKENS = ("Namespace", "kube-system-tokens")
POD = ("spec", "template", "spec")


def at(document, *path):
    for key in path:
        if isinstance(document, list) and isinstance(key, str):
            document = next((item for item in document if item.get("name") == key), None)
        else:
            document = document.get(key) if isinstance(document, dict) else document[key]
        if document is None:
            return None
    return document


def replace(document, *path):
    """Replaces a field, if it is there. The last element is a function of its value."""
    *path, key, change = path
    parent = at(document, *path)
    if parent is not None and parent.get(key) is not None:
        parent[key] = Template(change(parent[key]))


def namespaced(value, namespace):
    """Replaces the namespace of the overlay by that of the release."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "namespace" and inner in (namespace, f"{namespace}-tokens"):
                value[key] = Template(NAMESPACE + inner[len(namespace) :])
            else:
                namespaced(inner, namespace)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if isinstance(inner, str) and f":{namespace}:" in inner:
                value[index] = Template(json.dumps(inner.replace(f":{namespace}:", f":{NAMESPACE}:")))
            else:
                namespaced(inner, namespace)


def fields(objects, namespace):
    """Replaces the fields of all objects that one value sets."""
    for (kind, name), document in objects.items():
        namespaced(document, namespace)
        if kind == "Namespace":
            document["metadata"]["name"] = Template(NAMESPACE + ("-tokens" if name == TOKENS[1] else ""))
        for part, container in ((SERVER, "tunnel-server"), (AGENT, "tunnel-agent")):
            if (kind, name) != part:
                continue
            where = (*POD, "containers", container)
            replace(document, *where, "image", lambda _: '{{ include "culvert.image" (list . "' + container + '") }}')
            replace(document, *where, "imagePullPolicy", lambda _: "{{ .Values.image.pullPolicy }}")
        if (kind, name) == SERVER:
            replace(document, "spec", "replicas", lambda old: f"{{{{ .Values.server.replicas | default {old} }}}}")
        if (kind, name) == AGENTS_SERVICE:
            policy = lambda old: f'{{{{ .Values.service.externalTrafficPolicy | default "{old}" }}}}'
            replace(document, "spec", "externalTrafficPolicy", policy)
            for port in document["spec"]["ports"]:
                replace(port, "nodePort", lambda _: "{{ .Values.service.nodePort }}")
        if kind == "HorizontalPodAutoscaler":
            replace(document, "spec", "minReplicas", lambda _: "{{ .Values.autoscaling.minReplicas }}")
            replace(document, "spec", "maxReplicas", lambda _: "{{ .Values.autoscaling.maxReplicas }}")
        if (kind, name) == ("ConfigMap", "tunnel-agent"):
            assert document["data"]["server"] == PLACEHOLDER, document
            document["data"]["server"] = Template('{{ include "culvert.advertise" . | quote }}')
        if (kind, name) == ("ConfigMap", "yurt-tunnel-server-cfg"):
            for scheme in ("http", "https", "localhost"):
                key = f"{scheme}-proxy-ports"
                replace(document, "data", key, lambda _, scheme=scheme: f"{{{{ .Values.proxyPorts.{scheme} | quote }}}}")


def without(objects, *keys):
    return {key: value for key, value in objects.items() if key not in keys}


def without_dns(plain):
    """Returns the objects of a server without DNS."""
    objects = copy.deepcopy(without(plain, ("Service", "tunnel-dns")))
    container = at(objects[SERVER], *POD, "containers", "tunnel-server")
    container["args"] = [word for word in container["args"] if not word.startswith("--dns-listen=")]
    container["ports"] = [port for port in container["ports"] if port["name"] not in ("dns", "dns-tcp")]
    for rule in objects["NetworkPolicy", "tunnel-server"]["spec"]["ingress"]:
        rule["ports"] = [port for port in rule["ports"] if port["port"] != 10053]
    return objects


def with_type_cluster_ip(balanced):
    """Returns the objects of the overlay loadbalancer for a Service without an outside."""
    objects = copy.deepcopy(balanced)
    spec = objects[AGENTS_SERVICE]["spec"]
    spec["type"] = "ClusterIP"
    del spec["externalTrafficPolicy"]
    for port in spec["ports"]:
        port.pop("nodePort", None)
    return objects


def condition_of(overlay):
    conditions = {
        "egress-selector-tcp": ".Values.connectListener.enabled",
        "kubelet-cert": ".Values.agent.kubeletCertificate",
        "loadbalancer": 'eq .Values.service.type "LoadBalancer"',
        "namespace": 'ne .Release.Namespace "kube-system"',
        "require-certificate": ".Values.server.requireClientCertificate",
        "scale": ".Values.autoscaling.enabled",
    }
    return conditions.get(overlay, f'eq .Values.variant "{overlay}"')


def override(value):
    """Returns the hook of a field whose value replaces the default."""
    return (
        ["{{- with .Values." + value + " }}", "PAD{{- toYaml . | nindent INDENT }}", "{{- else }}"],
        ["{{- end }}"],
    )


def append(value):
    """Returns the hook of a field to which a value adds entries."""
    return [], ["{{- with .Values." + value + " }}", "PAD{{- toYaml . | nindent INDENT }}", "{{- end }}"]


def hooks():
    found = {}
    for part, name, values in ((SERVER, "tunnel-server", "server"), (AGENT, "tunnel-agent", "agent")):
        pod = (*part, *POD)
        container = (*pod, "containers", name)
        secrets = ["{{- with .Values.image.pullSecrets }}", "PADimagePullSecrets:", "PAD{{- toYaml . | nindent INDENT }}", "{{- end }}"]
        found[pod] = ([], secrets)
        found[(*container, "args")] = append(f"{values}.extraArgs")
        found[(*container, "resources")] = override(f"{values}.resources")
        found[(*pod, "nodeSelector")] = append(f"{values}.nodeSelector")
    found[(*SERVER, *POD, "tolerations")] = append("server.tolerations")
    found[(*AGENT, *POD, "tolerations")] = override("agent.tolerations")
    ranges = ["{{- with .Values.service.loadBalancerSourceRanges }}", "PADloadBalancerSourceRanges:", "PAD{{- toYaml . | nindent INDENT }}", "{{- end }}"]
    found[(*AGENTS_SERVICE, "spec")] = ([], ranges)
    annotations = ["{{- with .Values.service.annotations }}", "PADannotations:", "PAD  {{- toYaml . | nindent 4 }}", "{{- end }}"]
    found[(*AGENTS_SERVICE, "metadata")] = ([], annotations)
    edge = ["{{- if ne .Values.edgeLabel \"" + EDGE + "\" }}", "PAD- --edge-label={{ .Values.edgeLabel }}", "{{- end }}"]
    args = (*SERVER, *POD, "containers", "tunnel-server", "args")
    found[args] = ([], [*edge, *found[args][1]])
    return found


# Written in place of the label, which is a value of the chart as well.
EDGE = "EDGE-LABEL"
HOOKS = hooks()
KEEP = ["{{- if .Values.keepState }}", "  annotations:", "    helm.sh/resource-policy: keep", "{{- end }}"]


def file_of(kind, name):
    if (kind, name) == ("ServiceAccount", "tunnel-agent") or kind == "DaemonSet":
        return "agent"
    if kind == "ServiceMonitor" or name == "tunnel-server-metrics":
        return "monitoring"
    if kind == "ConfigMap" and name in ("tunnel-agent", "yurt-tunnel-server-cfg"):
        return "config"
    files = {
        "Service": "services", "ConfigMap": "filled", "Secret": "filled", "Lease": "filled",
        "NetworkPolicy": "policies", "Namespace": "namespace", "Deployment": "server",
        "PodDisruptionBudget": "server", "HorizontalPodAutoscaler": "server",
    }
    return files.get(kind, "accounts")


def main(folder, monitors, version, chart):
    overlays = {}
    for file in sorted(glob.glob(f"{folder}/*.yaml")):
        with open(file) as rendered:
            overlays[os.path.basename(file)[: -len(".yaml")]] = parse(rendered.read())
    plain = overlays.pop("plain")
    # One object under two names.
    overlays["namespace"][TOKENS] = overlays["namespace"].pop(("Namespace", "culvert-tokens"))
    off = [
        ("not .Values.dns.enabled", without_dns(plain)),
        ("not .Values.agent.enabled", without(plain, AGENT, ("ServiceAccount", "tunnel-agent"))),
        ("not .Values.podDisruptionBudget.enabled", without(plain, ("PodDisruptionBudget", "tunnel-server"))),
        ("not .Values.networkPolicy.enabled", without(plain, ("NetworkPolicy", "tunnel-server"))),
        ('eq .Values.service.type "ClusterIP"', with_type_cluster_ip(overlays["loadbalancer"])),
    ]
    with open(monitors) as text:
        # The last document is for exporters on edge nodes, which are not of this chart.
        monitored = parse("---\n".join(text.read().split("---\n")[:2]))
    off.append((".Values.monitoring.enabled", {**plain, **monitored}))
    variants = [(condition_of(name), objects) for name, objects in overlays.items()] + off
    variants = [(condition, copy.deepcopy(objects)) for condition, objects in variants]
    for condition, objects in variants:
        fields(objects, "culvert" if condition == condition_of("namespace") else "kube-system")
    plain = copy.deepcopy(plain)
    fields(plain, "kube-system")

    files = {}
    keys = {key for _, objects in [("", plain), *variants] for key in objects}
    for key in sorted(keys):
        values = [(condition, objects.get(key, MISSING)) for condition, objects in variants]
        base = plain.get(key, MISSING)
        if key[0] == "Namespace" and key != TOKENS:
            condition = 'and .Values.namespace.create (ne .Release.Namespace "kube-system")'
            values = [(condition, value) for _, value in values if value is not MISSING]
        if key == TOKENS:
            values.append(("not .Values.namespace.createTokens", MISSING))
        lines = document(key, base, values)
        files.setdefault(file_of(*key), []).append(lines)
    for name, documents in files.items():
        text = "{{- /* Made from deploy/manifests by deploy/chart.sh; do not edit. */}}\n"
        text += "".join("\n".join(lines) + "\n" for lines in documents)
        text = text.replace(EDGE_LABEL, "{{ .Values.edgeLabel }}").replace(EDGE, EDGE_LABEL)
        with open(f"{chart}/templates/{name}.yaml", "w") as file:
            file.write(text)
    with open(f"{chart}/Chart.yaml", "w") as file:
        file.write(CHART.replace("VERSION", version))


def document(key, base, variants):
    """Returns the lines of one object, with the separator of documents."""
    others = [(condition, value) for condition, value in variants if value is MISSING or value != base]
    if base is MISSING:
        value = next(value for _, value in others if value is not MISSING)
        present = [condition for condition, other in others if other is not MISSING]
        return wrapped(any_of(present), ["---", *mapping(value, [], 0, key)])
    removed = [condition for condition, value in others if value is MISSING]
    changed = [(condition, value) for condition, value in others if value is not MISSING]
    lines = ["---", *mapping(base, changed, 0, key)]
    if file_of(*key) == "filled" or key == TOKENS:
        index = lines.index("metadata:")
        lines[index + 1 : index + 1] = KEEP
    return wrapped(none_of(removed), lines) if removed else lines


CHART = """# Made by deploy/chart.sh; do not edit.
apiVersion: v2
name: culvert
description: Reverse tunnel between a cluster and its edge nodes
type: application
version: VERSION
appVersion: VERSION
kubeVersion: ">= 1.25.0-0"
"""

main(*sys.argv[1:])
