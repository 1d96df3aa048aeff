//! The suite that every transport must pass: one meaning of open, refuse, half-close, reset, drop and close.
