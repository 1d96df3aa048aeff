//! A program of a Pod that uses the API server as kube does by default: by the address in its
//! environment and the files of its ServiceAccount. It creates a ConfigMap and follows all of its
//! namespace.

use std::io::{self, Write};
use std::pin::pin;

use anyhow::Result;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config, ResourceExt as _};

#[tokio::main]
async fn main() -> Result<()> {
    let config = Config::incluster()?;
    let objects: Api<ConfigMap> = Api::default_namespaced(Client::try_from(config)?);
    let created = ConfigMap {
        metadata: ObjectMeta {
            name: Some("from-the-pod".to_owned()),
            ..ObjectMeta::default()
        },
        ..ConfigMap::default()
    };
    objects.create(&PostParams::default(), &created).await?;
    let events = watcher(objects, watcher::Config::default()).default_backoff();
    let mut events = pin!(events);
    let mut stdout = io::stdout().lock();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                writeln!(stdout, "applied {}", object.name_any())?;
            }
            Ok(_) => {}
            // The watch starts again by itself.
            Err(error) => writeln!(stdout, "{error}")?,
        }
        stdout.flush()?;
    }
    Ok(())
}
