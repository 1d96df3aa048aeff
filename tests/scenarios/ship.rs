//! What is shipped: manifests, images, units, examples and guides, in agreement with the code and with each other.

mod applied;
mod examples;
mod guides;
mod images;
mod manifests;
mod troubleshooting;
