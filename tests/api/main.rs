//! The server from outside: the real program on loopback with a bundled model, and the routes alone with a worker that plays a script.

mod faults;
mod http;
mod limits;
mod load;
mod program;
mod real;
mod scripted;
mod security;
mod streams;
