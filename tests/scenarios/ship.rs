//! Manifests, chart, images, units, examples and guides agree with the code and with each other.

mod applied;
mod chart;
mod examples;
mod guides;
mod helm_release;
mod host_guides;
mod images;
mod manifests;
mod monitoring;
mod overlays;
mod release;
mod render;
mod tools;
mod troubleshooting;
