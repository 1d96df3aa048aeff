//! End-to-end scenarios, one module per topic.
