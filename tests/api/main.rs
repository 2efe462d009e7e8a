//! The server from outside: the real program on loopback with a bundled model, and the routes alone with a worker that plays a script.

mod clients;
mod faults;
mod http;
mod limits;
mod load;
mod messages;
mod program;
mod real;
mod responses;
mod scripted;
mod security;
mod streams;
