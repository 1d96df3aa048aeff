//! Overlays that replace each other by `kubectl apply`, on a real API server: afterwards the objects
//! are those that the overlay gives alone.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Families, Real};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::eventually;
use tunnel_tests::manifests::{OVERLAYS, overlay, render, repository};
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::or_skip;

use crate::cluster::kustomizers;

/// How kubectl applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Apply {
    ClientSide,
    ServerSide,
}

/// Objects by their kind, namespace and name.
type Objects = BTreeMap<[String; 3], Value>;

#[tokio::test(flavor = "multi_thread")]
async fn real_overlays_that_replace_each_other_in_every_order_give_what_each_gives_alone()
-> Result<()> {
    let Some(cluster) = OverlayCluster::start().await? else {
        return Ok(());
    };
    for apply in [Apply::ServerSide, Apply::ClientSide] {
        let mut alone = Vec::new();
        for index in 0..cluster.overlays.len() {
            cluster.delete().await?;
            alone.push(cluster.apply(index, apply).await?);
        }
        let mut lost_ports = 0;
        let mut previous = cluster.overlays.len() - 1;
        for index in in_every_order(cluster.overlays.len()) {
            let mut found = cluster.apply(index, apply).await?;
            found.retain(|key, _| alone[index].contains_key(key));
            let (mut found, mut wanted) = (json_of(&found), json_of(&alone[index]));
            if apply == Apply::ClientSide {
                // kubectl tells ports of a container apart by their number alone.
                let (found, wanted) = (
                    take_udp_host_port(&mut found),
                    take_udp_host_port(&mut wanted),
                );
                lost_ports += usize::from(found != wanted);
            }
            ensure!(
                found == wanted,
                "{apply:?} of {} over {}: {found:#} instead of {wanted:#}",
                cluster.overlays[index].0,
                cluster.overlays[previous].0,
            );
            previous = index;
        }
        // The reason for `--server-side` in the guides.
        ensure!(
            (lost_ports > 0) == (apply == Apply::ClientSide),
            "{apply:?}: {lost_ports}"
        );
    }
    Ok(())
}

#[test]
fn guides_apply_overlays_by_the_server() -> Result<()> {
    let mut applied = 0;
    for page in [
        "how-to/egress-selector",
        "how-to/servers",
        "how-to/openyurt",
        "tutorials/cluster",
    ] {
        let text = std::fs::read_to_string(repository().join(format!("docs/{page}.md")))?;
        let lines = text
            .lines()
            .filter(|line| line.contains("manifests.sh") && line.contains(" | kubectl"));
        for line in lines {
            ensure!(
                line.ends_with(" | kubectl apply --server-side -f -"),
                "{page}: {line}"
            );
            applied += 1;
        }
    }
    ensure!(applied >= 6, "{applied}");
    Ok(())
}

/// Returns indices in an order in which each pair of different ones is adjacent, both ways round.
fn in_every_order(count: usize) -> Vec<usize> {
    let pairs =
        (0..count).flat_map(|first| (first + 1..count).flat_map(move |second| [first, second]));
    pairs.chain([0]).collect()
}

#[test]
fn order_has_each_pair_both_ways_round() {
    let order = in_every_order(9);
    let pairs: std::collections::BTreeSet<_> =
        order.windows(2).map(|pair| (pair[0], pair[1])).collect();
    assert_eq!((pairs.len(), order.len()), (9 * 8, 9 * 8 + 1));
}

/// An API server, and the objects that differ between overlays.
struct OverlayCluster {
    real: Real,
    kubectl: PathBuf,
    scratch: ScratchDir,
    /// Each with its file.
    overlays: Vec<(&'static str, PathBuf)>,
}

impl OverlayCluster {
    async fn start() -> Result<Option<Self>> {
        let programs = Real::binaries().and_then(|folder| Ok((folder, kustomizers()?)));
        let Some((folder, files)) = or_skip(programs) else {
            return Ok(None);
        };
        let own = folder.join("kubectl");
        let installed = files.into_iter().next().context("one at least")?;
        let kubectl = if own.is_file() { own } else { installed };
        let scratch = ScratchDir::new()?;
        // Overlay `namespace` has objects of its own, in another namespace.
        let names = OVERLAYS.iter().filter(|name| **name != "namespace");
        let mut rendered = Vec::new();
        for name in names {
            let objects = render(&kubectl, &overlay(name))?;
            rendered.push((
                *name,
                objects
                    .into_iter()
                    .map(|object| (key(&object), object))
                    .collect::<Objects>(),
            ));
        }
        let is_everywhere = |key: &[String; 3], object: &Value| {
            rendered
                .iter()
                .all(|(_, objects)| objects.get(key) == Some(object))
        };
        let mut overlays = Vec::new();
        for (name, objects) in &rendered {
            let differing = objects
                .iter()
                .filter(|(key, object)| !is_everywhere(key, object));
            let list = json!({
                "apiVersion": "v1", "kind": "List",
                "items": differing.map(|(_, object)| object).collect::<Vec<_>>(),
            });
            overlays.push((
                *name,
                scratch.file(&format!("{name}.json"), list.to_string())?,
            ));
        }
        let real = Real::start(&folder, Families::V4).await?;
        let cluster = Self {
            real,
            kubectl,
            scratch,
            overlays,
        };
        // The API server creates the namespace soon after its start.
        eventually("the namespace", WAIT_TIMEOUT, async || {
            cluster.kubectl(&["get", "namespace", "kube-system"]).await
        })
        .await;
        Ok(Some(cluster))
    }

    async fn kubectl(&self, words: &[&str]) -> Result<String> {
        let program = Program::at(&self.kubectl)
            .env("KUBECONFIG", self.real.admin_kubeconfig())
            .env("HOME", self.scratch.path());
        program.args(words.iter().copied()).run().await?.ok()
    }

    /// Deletes the objects of all overlays.
    async fn delete(&self) -> Result<()> {
        let files: Vec<_> = self
            .overlays
            .iter()
            .map(|(_, file)| file.to_string_lossy())
            .collect();
        let mut words = vec!["delete", "--ignore-not-found", "--wait=false"];
        words.extend(files.iter().flat_map(|file| ["-f", &**file]));
        self.kubectl(&words).await.map(drop)
    }

    /// Applies an overlay. Returns its objects as the API server has them then.
    async fn apply(&self, index: usize, apply: Apply) -> Result<Objects> {
        let (name, file) = &self.overlays[index];
        let file = file.to_string_lossy();
        let by_server: &[&str] = match apply {
            Apply::ClientSide => &[],
            Apply::ServerSide => &["--server-side"],
        };
        let words = [&["apply", "-f", &file][..], by_server].concat();
        self.kubectl(&words).await.context(*name)?;
        let list = self.kubectl(&["get", "-f", &file, "-o", "json"]).await?;
        let list: Value = serde_json::from_str(&list)?;
        let objects = list["items"].as_array().context("no list")?;
        Ok(objects
            .iter()
            .map(|object| (key(object), declared(object)))
            .collect())
    }
}

fn key(object: &Value) -> [String; 3] {
    let fields = [
        &object["kind"],
        &object["metadata"]["namespace"],
        &object["metadata"]["name"],
    ];
    fields.map(|field| field.as_str().unwrap_or_default().to_owned())
}

/// Returns an object without what the API server assigns.
fn declared(object: &Value) -> Value {
    let mut object = object.clone();
    let metadata = json!({
        "labels": object["metadata"]["labels"],
        "name": object["metadata"]["name"],
    });
    object["metadata"] = metadata;
    for field in [
        "status",
        "/spec/clusterIP",
        "/spec/clusterIPs",
        "/spec/healthCheckNodePort",
    ] {
        let (parent, field) = match field.rsplit_once('/') {
            Some((parent, field)) => (object.pointer_mut(parent), field),
            None => (Some(&mut object), field),
        };
        if let Some(fields) = parent.and_then(Value::as_object_mut) {
            fields.remove(field);
        }
    }
    object
}

fn json_of(objects: &Objects) -> Value {
    objects
        .iter()
        .map(|(key, object)| (key.join("/"), object.clone()))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Removes the port of the host for QUIC from the Deployment of the servers, and returns it.
fn take_udp_host_port(objects: &mut Value) -> Option<Value> {
    let ports = objects
        .get_mut("Deployment/kube-system/tunnel-server")?
        .pointer_mut("/spec/template/spec/containers/0/ports")?
        .as_array_mut()?;
    let quic = ports
        .iter_mut()
        .find(|port| port["name"] == "agents-quic")?;
    quic.as_object_mut()?.remove("hostPort")
}
