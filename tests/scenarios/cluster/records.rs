//! The ConfigMap of the records: its text, the changes that it follows, and the failures that it
//! survives.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use serde_json::json;
use tunnel_tests::cluster::{Families, Kind, Node, Objects, cloud, edge};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::Listener;

use super::hosts_file::parse;
use super::{ClusterEnv, FIRST, GUIDE_IP, GUIDE_RECORDS, REACTION, READYZ, fetch_text};

on_both!(
    dns_1_records_are_those_of_the_guide_byte_for_byte,
    dns_5_a_flipped_label_and_a_changed_address_are_followed,
    dns_6_deleting_a_node_leaves_those_whose_names_end_alike,
    dns_7_the_controller_recovers_from_objects_that_are_missing_or_empty,
    f22_a_deleted_map_is_made_again_and_foreign_edits_are_repaired_or_preserved,
    t13_hostile_addresses_of_nodes_make_no_foreign_record,
    t14_records_that_fit_are_maintained_while_others_do_not,
    no_record_is_written_without_the_address_of_the_service,
);

async fn dns_1_records_are_those_of_the_guide_byte_for_byte(cluster_env: ClusterEnv) -> Result<()> {
    let _server = cluster_env.guided_server().await?;
    let map = cluster_env.objects().records_map().await?;
    ensure!(
        map["data"] == json!({ "tunnel-nodes": GUIDE_RECORDS }),
        "{map}"
    );
    ensure!(map["binaryData"].is_null(), "{map}");
    Ok(())
}

async fn dns_5_a_flipped_label_and_a_changed_address_are_followed(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let _server = cluster_env.guided_server().await?;
    let objects = cluster_env.objects();
    objects.set_edge("worker-1", false).await?;
    let both = "192.168.33.220\tmaster-1\n192.168.33.221\tworker-1";
    cluster_env.wait_for_records(REACTION, both).await;
    objects.set_edge("worker-1", true).await?;
    cluster_env.wait_for_records(REACTION, GUIDE_RECORDS).await;
    for (kind, address) in [
        ("InternalIP", "192.168.33.230"),
        ("ExternalIP", "203.0.113.5"),
    ] {
        let addresses = json!([{ "type": kind, "address": address }]);
        objects.set_addresses("master-1", addresses).await?;
        let records = format!("10.106.217.16\tworker-1\n{address}\tmaster-1");
        cluster_env.wait_for_records(REACTION, &records).await;
    }
    Ok(())
}

async fn dns_6_deleting_a_node_leaves_those_whose_names_end_alike(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.create_service(GUIDE_IP).await?;
    let nodes = ["1", "worker-1", "xworker-1"];
    for node in nodes {
        cluster_env.objects().add(&edge(node)).await?;
    }
    let _server = cluster_env.server("a").await?;
    let lines = nodes.map(|node| format!("{GUIDE_IP}\t{node}"));
    cluster_env.wait_for_records(FIRST, &lines.join("\n")).await;
    cluster_env.objects().remove("1").await?;
    let two = lines[1..].join("\n");
    cluster_env.wait_for_records(REACTION, &two).await;
    cluster_env.objects().remove("worker-1").await?;
    cluster_env.wait_for_records(REACTION, &lines[2]).await;
    Ok(())
}

async fn dns_7_the_controller_recovers_from_objects_that_are_missing_or_empty(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let (admin, objects) = (cluster_env.admin(), cluster_env.objects());
    let labels = json!({ "metadata": { "labels": { "mine": "x" } } });
    let empty = admin.merge(&Objects::records_path(), &labels).await?;
    ensure!(empty["data"].is_null(), "{empty}");
    let server = cluster_env.guided_server().await?;
    let map = objects.records_map().await?;
    ensure!(map["metadata"]["labels"]["mine"] == "x", "{map}");

    admin.delete(&service_path()).await?;
    cluster_env.create_service("10.106.217.99").await?;
    let records = GUIDE_RECORDS.replace(GUIDE_IP, "10.106.217.99");
    cluster_env.wait_for_records(REACTION, &records).await;

    let extra = Some((9100, server.address(Listener::Https).port()));
    let ports = [("https-proxy-ports", "9100")];
    objects.set_ports(&ports).await?;
    cluster_env.wait_for_ports(extra).await;
    objects.remove_ports().await?;
    cluster_env.wait_for_ports(None).await;
    objects.set_ports(&ports).await?;
    cluster_env.wait_for_ports(extra).await;
    Ok(())
}

fn service_path() -> String {
    Objects::path("services", "x-tunnel-server-internal-svc")
}

async fn f22_a_deleted_map_is_made_again_and_foreign_edits_are_repaired_or_preserved(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.cluster.allow_creation().await?;
    let _server = cluster_env.guided_server().await?;
    let (admin, path) = (cluster_env.admin(), Objects::records_path());
    admin.delete(&path).await?;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let edit = json!({ "data": { "tunnel-nodes": "10.0.0.1\tsomebody-else", "theirs": "1" }, "metadata": { "annotations": { "note": "x" } } });
    let without_records = json!({ "data": { "tunnel-nodes": null } });
    for edit in [edit, without_records] {
        admin.merge(&path, &edit).await?;
        cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
        let map = cluster_env.objects().records_map().await?;
        ensure!(
            map["data"]["theirs"] == "1" && map["metadata"]["annotations"]["note"] == "x",
            "{map}"
        );
    }
    Ok(())
}

async fn t13_hostile_addresses_of_nodes_make_no_foreign_record(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let objects = cluster_env.objects();
    let long = "a".repeat(254);
    for (number, hostile) in HOSTILE.into_iter().chain([long.as_str()]).enumerate() {
        // The API validates the names of Nodes, but a kubelet may report any address.
        let edge = edge(&format!("edge-{number}")).addressed("Hostname", hostile);
        let cloud = Node::new(&format!("cloud-{number}")).addressed("InternalIP", hostile);
        objects.add(&edge).await?;
        objects.add(&cloud).await?;
    }
    let good = cloud("last", "192.168.33.9").addressed("Hostname", "Last.Example");
    objects.add(&good).await?;
    let _server = cluster_env.server("a").await?;
    let records = eventually("the last node's record", FIRST, async || {
        let records = objects.records().await?;
        ensure!(
            records.contains("\tlast\n") || records.ends_with("\tlast"),
            "{records}"
        );
        Ok(records)
    })
    .await;
    let found = parse(&records);
    let mut expected: Vec<String> = (0..=HOSTILE.len())
        .map(|number| format!("edge-{number}"))
        .collect();
    expected.extend(["last", "last.example", "master-1", "worker-1"].map(str::to_owned));
    // One of the hostile strings is a valid address. The server refuses names in foreign domains,
    // even if they are well-formed.
    expected.push("cloud-11".to_owned());
    expected.sort();
    let names: Vec<_> = found.keys().cloned().collect();
    ensure!(
        names == expected,
        "names {names:?}, not {expected:?}, in\n{records}"
    );
    for (name, address) in [("worker-1", GUIDE_IP), ("master-1", "192.168.33.220")] {
        ensure!(found[name] == [address.parse::<IpAddr>()?], "{records}");
    }
    ensure!(
        records
            .lines()
            .all(|line| line.matches('\t').count() == 1 && !line.contains([' ', '#', '\r', '\0'])),
        "{records}"
    );
    Ok(())
}

/// Strings that a hostile kubelet might report as its address.
const HOSTILE: [&str; 14] = [
    "x 10.0.0.1 kubernetes.default",
    "x\n10.0.0.1\tmaster-1",
    "x\t10.0.0.1",
    "x#y",
    "x\0y",
    "bücher.example",
    "localhost",
    "localhost.",
    "*.example",
    "-x",
    "kubernetes.default.svc.cluster.local",
    "10.0.0.1",
    "Upper.Example",
    "dotted.example.",
];

async fn t14_records_that_fit_are_maintained_while_others_do_not(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let server = cluster_env.guided_server().await?;
    let (admin, path) = (cluster_env.admin(), Objects::records_path());
    let objects = cluster_env.objects();
    let filling = "x".repeat(1024 * 1024 - GUIDE_RECORDS.len());
    let filling = json!({ "data": { "theirs": filling } });
    admin.merge(&path, &filling).await?;
    objects.add(&edge("worker-2")).await?;
    let is_reported = async |text: &str| {
        let ready_text = fetch_text(&server, READYZ).await?;
        ensure!(ready_text.contains(text), "readyz reports {ready_text}");
        Ok(())
    };
    eventually("the condition", scaled(FIRST), async || {
        is_reported("1048576 bytes: 1, from worker-2 on").await
    })
    .await;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;

    // A node that becomes a cloud node is written before those that stay edge nodes, and a node that
    // goes makes room.
    objects
        .set_addresses(
            "worker-2",
            json!([{ "type": "InternalIP", "address": "10.106.217.1" }]),
        )
        .await?;
    objects.set_edge("worker-2", false).await?;
    let flipped = "10.106.217.1\tworker-2\n192.168.33.220\tmaster-1";
    cluster_env.wait_for_records(FIRST, flipped).await;
    eventually("the other name", scaled(FIRST), async || {
        is_reported("1048576 bytes: 1, from worker-1 on").await
    })
    .await;
    objects.remove("master-1").await?;
    let removed = "10.106.217.1\tworker-2\n10.106.217.16\tworker-1";
    cluster_env.wait_for_records(FIRST, removed).await;

    let emptied = json!({ "data": { "theirs": null } });
    admin.merge(&path, &emptied).await?;
    objects.add(&edge("worker-3")).await?;
    let all = format!("{removed}\n10.106.217.16\tworker-3");
    cluster_env.wait_for_records(FIRST, &all).await;
    Ok(())
}

async fn no_record_is_written_without_the_address_of_the_service(
    cluster_env: ClusterEnv,
) -> Result<()> {
    // The server creates the map after it has listed all objects.
    cluster_env.cluster.allow_creation().await?;
    let (admin, objects) = (cluster_env.admin(), cluster_env.objects());
    admin.delete(&Objects::records_path()).await?;
    cluster_env.add_nodes().await?;
    let _server = cluster_env.server("a").await?;
    let map = async || objects.records_map().await;
    let made = eventually("the empty map", FIRST, map).await;
    ensure!(
        made["data"]["tunnel-nodes"]
            .as_str()
            .unwrap_or_default()
            .is_empty(),
        "{made}"
    );
    cluster_env.create_service("None").await?;
    admin.delete(&service_path()).await?;
    let map = objects.records_map().await?;
    ensure!(
        map["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"],
        "written without an address: {map}"
    );
    cluster_env.create_service(GUIDE_IP).await?;
    cluster_env.wait_for_records(REACTION, GUIDE_RECORDS).await;
    Ok(())
}

mod dual {
    use super::*;

    async fn both_families(kind: Kind) -> Result<()> {
        let Some(cluster_env) = ClusterEnv::with_families(kind, Families::Dual).await? else {
            return Ok(());
        };
        let objects = cluster_env.objects();
        let service = objects
            .create_service(|service| service["spec"]["ipFamilyPolicy"] = "PreferDualStack".into())
            .await?;
        let addresses: Vec<_> = service["spec"]["clusterIPs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|ip| ip.as_str())
            .collect();
        ensure!(addresses.len() == 2, "{service}");
        objects.add(&edge("worker-1")).await?;
        let master = cloud("master-1", "192.168.33.220").addressed("InternalIP", "fd00::220");
        objects.add(&master).await?;
        let _server = cluster_env.server("a").await?;
        let mut lines = [
            format!("{}\tworker-1", addresses[0]),
            format!("{}\tworker-1", addresses[1]),
            "192.168.33.220\tmaster-1".to_owned(),
            "fd00::220\tmaster-1".to_owned(),
        ];
        lines.sort();
        cluster_env.wait_for_records(FIRST, &lines.join("\n")).await;
        Ok(())
    }

    tests_of! {
        fn fake_api_a_node_has_a_record_of_each_family() = both_families(Kind::FakeApiServer);
        fn real_a_node_has_a_record_of_each_family() = both_families(Kind::Real);
    }
}
