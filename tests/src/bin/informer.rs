//! A client of the API server with the configuration of every pod: an informer on ConfigMaps that
//! prints what it receives. After its first list the client writes a ConfigMap of its own.

use std::io::{self, Write};
use std::pin::pin;
use std::process::ExitCode;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config, ResourceExt};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Errors are lost if standard error is closed.
            let _ = writeln!(io::stderr(), "informer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let name = std::env::args().nth(1).context("the name of a ConfigMap")?;
    let client = Client::try_from(Config::incluster()?)?;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let events = watcher(maps.clone(), watcher::Config::default());
    let mut events = pin!(events.default_backoff());
    let mut has_written = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => {}
            Ok(Event::InitDone) => {
                if !has_written {
                    write(&maps, &name).await?;
                    has_written = true;
                }
            }
            Ok(Event::Apply(map) | Event::InitApply(map)) => {
                print(&format!("applied {}", map.name_any()))?;
            }
            Ok(Event::Delete(map)) => print(&format!("deleted {}", map.name_any()))?,
            Err(error) => print(&format!("error: {error}"))?,
        }
    }
    Ok(())
}

/// Creates and deletes the ConfigMap `name`.
async fn write(maps: &Api<ConfigMap>, name: &str) -> Result<()> {
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        ..ConfigMap::default()
    };
    maps.create(&PostParams::default(), &map)
        .await
        .context("create")?;
    let deleted = maps.delete(name, &DeleteParams::default()).await;
    deleted.map(drop).context("delete")
}

fn print(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("print")
}
