//! The pages of the reference that are generated: settings from the command line definitions and
//! the table of limits, metrics from the registries, log fields from their table, TLS with targets
//! from the provider, the index of files from the sources.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

mod files;
mod log_fields;
mod metrics;
mod target_tls;

pub use log_fields::LOG_FIELDS;
pub use target_tls::{CertificateIssuer, CertificateRecipe, TARGETS, TargetCase, TargetVerdict};

#[derive(Debug)]
pub struct Page {
    /// Path of the page in the repository.
    pub path: &'static str,
    content: PageContent,
}

#[derive(Debug)]
enum PageContent {
    Settings(SettingsPage),
    Metrics,
    LogFields,
    TargetTls,
    Files,
}

#[derive(Debug)]
struct SettingsPage {
    command: fn() -> Command,
    limits: &'static [(&'static str, &'static str, &'static str)],
    extra: &'static str,
}

pub const PAGES: &[Page] = &[
    Page {
        path: "docs/reference/tunnel-server.md",
        content: PageContent::Settings(SettingsPage {
            command: tunnel_server::cli::command,
            limits: tunnel_server::config::LIMITS,
            extra: SERVICES,
        }),
    },
    Page {
        path: "docs/reference/tunnel-agent.md",
        content: PageContent::Settings(SettingsPage {
            command: tunnel_agent::cli::command,
            limits: tunnel_agent::config::LIMITS,
            extra: "",
        }),
    },
    Page {
        path: "docs/reference/metrics.md",
        content: PageContent::Metrics,
    },
    Page {
        path: "docs/reference/log-fields.md",
        content: PageContent::LogFields,
    },
    Page {
        path: "docs/reference/targets.md",
        content: PageContent::TargetTls,
    },
    Page {
        path: "docs/reference/files.md",
        content: PageContent::Files,
    },
];

pub fn render(page: &Page) -> String {
    match &page.content {
        PageContent::Settings(settings) => settings_page(settings),
        PageContent::Metrics => metrics::page(),
        PageContent::LogFields => log_fields::page(),
        PageContent::TargetTls => target_tls::page(),
        PageContent::Files => files::page(),
    }
}

fn settings_page(page: &SettingsPage) -> String {
    let command = (page.command)();
    let mut text = format!(
        "# {}\n\nGenerated from the code by `make docs`; do not edit.\n\n",
        command.get_name()
    );
    let about = command
        .get_about()
        .map(ToString::to_string)
        .unwrap_or_default();
    put(&mut text, format_args!("{about}.\n\n"));
    text.push_str(
        "Settings are taken from flags, then the environment, then the YAML file of `--config`, then the defaults. A flag's\n\
         key in the file has the same words in camelCase. Where a key has a list, a single value is a list of one; ports and targets,\n\
         which a flag has as one text, may be a list. All mistakes of a file are reported at once, with their lines.\n",
    );
    verbs(&mut text, &command, command.get_name());
    if !page.limits.is_empty() {
        text.push_str("\n## `limits:` of the file\n\n| key | default | |\n|---|---|---|\n");
        for (name, default, meaning) in page.limits {
            put(
                &mut text,
                format_args!("| `{name}` | {default} | {meaning} |\n"),
            );
        }
    }
    text.push_str(page.extra);
    text
}

fn verbs(text: &mut String, command: &Command, path: &str) {
    let run = command.find_subcommand("run").into_iter();
    let settings: Vec<&str> = run.flat_map(flags_of).map(id_of).collect();
    for verb in command
        .get_subcommands()
        .filter(|verb| verb.get_name() != "help")
    {
        let path = format!("{path} {}", verb.get_name());
        let about = verb
            .get_about()
            .map(ToString::to_string)
            .unwrap_or_default();
        put(text, format_args!("\n## `{path}`\n\n{about}.\n"));
        let mut flags = flags_of(verb);
        if ["check-config", "diag", "doctor"].contains(&verb.get_name()) {
            text.push_str("\nIt takes the flags and variables of `run`.\n");
            flags.retain(|flag| !settings.contains(&id_of(flag)));
        }
        for (heading, flags) in groups(&flags) {
            if let Some(heading) = heading {
                put(text, format_args!("\n### {heading}\n"));
            }
            text.push_str("\n| flag | variable | |\n|---|---|---|\n");
            flags.iter().for_each(|flag| row(text, flag));
        }
        verbs(text, verb, &path);
    }
}

fn flags_of(verb: &Command) -> Vec<&Arg> {
    verb.get_arguments()
        .filter(|flag| flag.get_id() != "help")
        .collect()
}

/// Returns the flags in the groups of `--help`, each in the order of its first flag. Where `--help`
/// has no headings, this is one group without a name.
fn groups<'a>(flags: &[&'a Arg]) -> Vec<(Option<&'a str>, Vec<&'a Arg>)> {
    let mut groups: Vec<(Option<&str>, Vec<&Arg>)> = Vec::new();
    for flag in flags {
        let heading = flag.get_help_heading();
        match groups.iter_mut().find(|(other, _)| *other == heading) {
            Some((_, flags)) => flags.push(flag),
            None => groups.push((heading, vec![flag])),
        }
    }
    groups
}

fn id_of(flag: &Arg) -> &str {
    flag.get_id().as_str()
}

fn row(text: &mut String, flag: &Arg) {
    let values = flag.get_value_names().map(|names| {
        names
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    });
    let takes_value = matches!(flag.get_action(), ArgAction::Set | ArgAction::Append);
    let value = values
        .filter(|_| takes_value)
        .map(|value| format!(" {value}"))
        .unwrap_or_default();
    let name = match flag.get_long() {
        Some(long) => format!("--{long}{value}"),
        None => value.trim().to_owned(),
    };
    let variable = flag
        .get_env()
        .map(|name| format!("`{}`", name.to_string_lossy()))
        .unwrap_or_default();
    let help = flag
        .get_long_help()
        .or_else(|| flag.get_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    let help = help
        .replace('|', "\\|")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    let name = name.replace('|', "\\|");
    put(text, format_args!("| `{name}` | {variable} | {help} |\n"));
}

fn put(text: &mut String, piece: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _infallible = text.write_fmt(piece);
}

const SERVICES: &str = "
## `ports:` of the file

Ports of the nodes that callers may reach, in addition to the lists of the flags or of the ConfigMap. An entry replaces what the
lists say about its port.

| key | |
|---|---|
| `number` | the port |
| `scheme` | `http` or `https`: the server may listen on the port as well (`proxyPortListen`), and in a cluster the Service has it; without a scheme it never does |
| `class` | address of the node that agents dial: `node` (default) or `loopback`, which the agent's `--localhost-ports` must admit |
| `listeners` | listeners that accept the port, of `http`, `https` and `connect`; all by default. `connect` is the CONNECT listeners and `tunnel-server connect` |
| `operations` | what callers may do [without rules](../how-to/policy.md#without-rules), in addition to reading: `read`, `write`, `upgrade`, or operations of a kubelet |

```yaml
ports:
  - { number: 9100, scheme: http }
  - { number: 22, listeners: [connect] }
  - { number: 5432, class: loopback, listeners: [connect] }
```

## `callers:`, `rules:` and `dryRun:` of the file

Names for callers, and rules that say who may do what. [Who may do what](../how-to/policy.md) has their keys and examples. `dryRun:`
has `callers:` and `rules:` that are [tried](../how-to/policy.md#try-rules-first).

```yaml
callers:
  ops: { user: ops }
rules:
  - { name: ssh, callers: [ops], ports: [22], listeners: [connect] }
```

| key of a caller | |
|---|---|
| `certificate` | common name of a client certificate of `--client-ca` |
| `user` | user of `--connect-auth` |
| `uid` | user at the other end of `--connect-uds`, as a number |
| `serviceAccount` | `NAMESPACE/NAME` of a bearer token, which the cluster reviews |
| `network` | source addresses of TCP connections |
| `agent` | name of the node of an agent that opens streams to targets of the cloud, in which one `*` stands for any text |

## `services:` of the file

Each entry listens on a TCP address and passes every connection, byte for byte, to one target behind one node.

| key | |
|---|---|
| `name` | for logs |
| `listen` | address with port on the server; other than loopback needs `allowUnauthenticated` |
| `node` | the node's name |
| `target` | `PORT` of the node (its loopback when the port is in `localhostProxyPorts`), `127.0.0.1:PORT`, or `HOST:PORT` of another machine that the agent's `--allow-targets` admits |
| `protocol` | `tcp` (default) |

```yaml
services:
  - { name: ssh-worker-1, listen: \"127.0.0.1:2201\", node: worker-1, target: \"22\" }
```

## `cloud:` of the file

Targets of the cloud that agents may reach by name, in addition to the `apiserver` of `--cloud-apiserver`. The server relays bytes
and ends no TLS. A host name is resolved for each stream, and never leads to loopback, a link-local address or a listener of the
server.

| key | |
|---|---|
| `name` | name by which agents ask for the target, a DNS label |
| `target` | `HOST:PORT`, or a list, whose entries are tried one after the other, the one that worked last first |
| `service` | `NAMESPACE/NAME:PORT` of a Service of the cluster, instead of `target` |
| `nodes` | nodes whose agents may reach the target; `[\"*\"]` for all |
| `label` | `KEY=VALUE`, instead of `nodes` in a cluster: nodes whose Node object has the label; without it new streams are refused |

A kubelet can set most labels on its own Node. With `label`, use a key that begins with `node-restriction.kubernetes.io/`, which the
admission plugin `NodeRestriction` denies to kubelets; others are refused. While the API server is away, the labels as last
seen hold.

```yaml
cloud:
  - { name: registry, target: \"registry.example:5000\", nodes: [worker-1, worker-2] }
  - { name: metrics, service: \"monitoring/prometheus:9090\", label: node-restriction.kubernetes.io/metrics=true }
```

## `dnsRecords:` of the file

Names that the embedded DNS answers in addition to those of the known nodes, with the first address of each family: cloud nodes,
which are reached directly. A name that is also a known node's is answered as written here.

```yaml
dnsRecords:
  - { name: master-1, addresses: [192.168.33.220] }
```
";
