//! cuDNN's backend: operation graphs, engines, plans.
//!
//! A descriptor is a bag of attributes. One attribute of another descriptor's is kept as that descriptor was
//! when it was set, as the manual has it (descriptors are finalized before). The heuristics know one
//! engine, number 0, without notes or knobs; every graph can run on it.
//!
//! The protocol of the getter: asked without room it tells how many elements there are; asked with room it
//! fills them in, and where they are descriptors, it fills the descriptors that the caller made.

mod graph;

use super::{DNN, Status, books};
use crate::constants as c;
use crate::gpu::border::{In, Out};
use crate::gpu::handle::Registry;
use crate::gpu::log;
use core::ffi::c_void;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most elements of an attribute that anyone sets; more is a mistake.
const MOST: i64 = 1 << 16;

#[derive(Clone)]
enum Value {
    Plain { count: i64, bytes: Vec<u8> },
    Bags(Vec<Arc<Bag>>),
}

#[derive(Clone)]
struct Bag {
    kind: i32,
    attributes: BTreeMap<i32, Value>,
}

impl Bag {
    fn new(kind: i32) -> Self {
        Self { kind, attributes: BTreeMap::new() }
    }

    /// A descriptor that the library makes itself.
    fn made(kind: i32, attributes: impl IntoIterator<Item = (i32, Value)>) -> Value {
        let mut bag = Self::new(kind);
        bag.attributes.extend(attributes);
        bag.finalize();
        Value::Bags(vec![Arc::new(bag)])
    }

    /// Adds what the library knows of a descriptor once it is complete.
    fn finalize(&mut self) {
        let known: &[(i32, Value)] = match self.kind {
            c::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR => {
                &[(c::CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, number(1))]
            }
            c::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR => {
                let graph = self.attributes.get(&c::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
                let graph =
                    graph.map(|graph| (c::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph.clone()));
                let index = (c::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, number(0));
                let engine = Self::made(
                    c::CUDNN_BACKEND_ENGINE_DESCRIPTOR,
                    graph.into_iter().chain([index]),
                );
                let configuration = Self::made(
                    c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
                    [(c::CUDNN_ATTR_ENGINECFG_ENGINE, engine)],
                );
                &[(c::CUDNN_ATTR_ENGINEHEUR_RESULTS, configuration)]
            }
            c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR => &[
                (c::CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, number(WORKSPACE)),
                (c::CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED, number(0)),
            ],
            c::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR => {
                match self.problem() {
                    Some(problem) => books::convolution(&problem),
                    None => books::other(),
                }
                &[
                    (c::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, number(WORKSPACE)),
                    (
                        c::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
                        Value::Plain { count: 3, bytes: b"{}\0".to_vec() },
                    ),
                ]
            }
            _ => &[],
        };
        self.attributes.extend(known.iter().cloned());
    }
}

static BAGS: Registry<Arc<Bag>> = Registry::new(38);

fn number(value: i64) -> Value {
    Value::Plain { count: 1, bytes: value.to_ne_bytes().to_vec() }
}

/// Bytes of one element; enumerations have four.
fn element_bytes(attribute_type: i32) -> usize {
    match attribute_type {
        c::CUDNN_TYPE_BOOLEAN | c::CUDNN_TYPE_CHAR => 1,
        c::CUDNN_TYPE_HANDLE
        | c::CUDNN_TYPE_INT64
        | c::CUDNN_TYPE_DOUBLE
        | c::CUDNN_TYPE_VOID_PTR
        | c::CUDNN_TYPE_BACKEND_DESCRIPTOR => 8,
        c::CUDNN_TYPE_FRACTION => crate::layout::cuda13::cudnnFractionStruct::SIZE,
        _ => 4,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendCreateDescriptor(kind: i32, out: Out<*mut c_void>) -> i32 {
    super::create(&BAGS, out, Arc::new(Bag::new(kind)))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> i32 {
    super::destroy(&BAGS, descriptor)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendSetAttribute(
    descriptor: *mut c_void,
    name: i32,
    attribute_type: i32,
    count: i64,
    elements: In<u8>,
) -> i32 {
    DNN.answer(|| {
        if !(0..=MOST).contains(&count) || (count > 0 && elements.is_null()) {
            return Err(DNN.bad_value());
        }
        let value = if attribute_type == c::CUDNN_TYPE_BACKEND_DESCRIPTOR {
            let handles = elements.cast::<*mut c_void>().list(count as usize);
            let bags = handles.into_iter().map(|h| BAGS.with(h, |bag| bag.clone()));
            Value::Bags(bags.collect::<Option<_>>().ok_or(DNN.bad_value())?)
        } else {
            let bytes = elements.list(count as usize * element_bytes(attribute_type));
            Value::Plain { count, bytes }
        };
        let found = BAGS.with(descriptor, |bag| Arc::make_mut(bag).attributes.insert(name, value));
        found.map(drop).ok_or(DNN.bad_value())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendFinalize(descriptor: *mut c_void) -> i32 {
    DNN.answer(|| BAGS.with(descriptor, |bag| Arc::make_mut(bag).finalize()).ok_or(DNN.bad_value()))
}

/// Bytes of workspace that a plan needs: see the head of `dnn`.
const WORKSPACE: i64 = 0;

/// Attributes of which the one engine has none.
const NONE: [i32; 8] = [
    c::CUDNN_ATTR_ENGINE_KNOB_INFO,
    c::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
    c::CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
    c::CUDNN_ATTR_ENGINE_LAYOUT_INFO,
    c::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
    c::CUDNN_ATTR_ENGINECFG_INTERMEDIATE_INFO,
    c::CUDNN_ATTR_EXECUTION_PLAN_COMPUTED_INTERMEDIATE_UIDS,
    c::CUDNN_ATTR_EXECUTION_PLAN_RUN_ONLY_INTERMEDIATE_UIDS,
];

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendGetAttribute(
    descriptor: *mut c_void,
    name: i32,
    attribute_type: i32,
    wanted: i64,
    count: Out<i64>,
    elements: Out<u8>,
) -> i32 {
    DNN.answer(|| {
        let bag = BAGS.with(descriptor, |bag| bag.clone()).ok_or(DNN.bad_value())?;
        log::debug(2, || format!("cuDNN attribute {name} of descriptor type {} is read", bag.kind));
        let room = if elements.is_null() { 0 } else { wanted.clamp(0, MOST) as usize };
        match bag.attributes.get(&name) {
            Some(Value::Plain { count: n, bytes }) => {
                count.give(*n);
                elements.fill(bytes, room * element_bytes(attribute_type));
                Ok(())
            }
            Some(Value::Bags(bags)) => {
                count.give(bags.len() as i64);
                for (i, bag) in bags.iter().take(room).enumerate() {
                    copy_into(elements.at(i * size_of::<*mut c_void>()), bag)?;
                }
                Ok(())
            }
            None if NONE.contains(&name) => {
                count.give(0);
                Ok(())
            }
            None => {
                log::warn_once(&format!("cuDNN backend attribute {name} is not supported"));
                Err(c::CUDNN_STATUS_NOT_SUPPORTED)
            }
        }
    })
}

/// Makes the caller's descriptor a copy of the library's.
fn copy_into(place: Out<*mut c_void>, bag: &Arc<Bag>) -> Status {
    let target = place.get().map_err(|_| DNN.bad_value())?;
    BAGS.with(target, |target| *target = bag.clone()).ok_or(DNN.bad_value())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libs::testing::{input, output};

    fn create(kind: i32) -> *mut c_void {
        BAGS.insert(Arc::new(Bag::new(kind)))
    }

    fn set<T>(bag: *mut c_void, name: i32, attribute_type: i32, value: &T) {
        let place = input(value);
        assert_eq!(cudnnBackendSetAttribute(bag, name, attribute_type, 1, place), 0);
    }

    fn get<T>(bag: *mut c_void, name: i32, attribute_type: i32, value: &mut T) -> i64 {
        let mut count = -1i64;
        let place = output(value);
        let counted = output(&mut count);
        assert_eq!(cudnnBackendGetAttribute(bag, name, attribute_type, 1, counted, place), 0);
        count
    }

    /// The way of every caller: graph, heuristics, configuration, engine, plan, workspace.
    #[test]
    fn from_graph_to_plan() {
        let graph = create(c::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        assert_eq!(cudnnBackendFinalize(graph), 0);
        let heuristics = create(c::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
        let descriptor = c::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        set(heuristics, c::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, descriptor, &graph);
        assert_eq!(cudnnBackendFinalize(heuristics), 0);

        let mut configuration = create(c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        let results = c::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        assert_eq!(get(heuristics, results, descriptor, &mut configuration), 1);
        let mut engine = create(c::CUDNN_BACKEND_ENGINE_DESCRIPTOR);
        let of = c::CUDNN_ATTR_ENGINECFG_ENGINE;
        assert_eq!(get(configuration, of, descriptor, &mut engine), 1);
        let mut index = -1i64;
        let global = c::CUDNN_ATTR_ENGINE_GLOBAL_INDEX;
        assert_eq!(get(engine, global, c::CUDNN_TYPE_INT64, &mut index), 1);
        assert_eq!(index, 0);
        let notes = c::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE;
        assert_eq!(get(engine, notes, c::CUDNN_TYPE_NUMERICAL_NOTE, &mut 0i32), 0);

        let plan = create(c::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        let name = c::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
        set(plan, name, descriptor, &configuration);
        assert_eq!(cudnnBackendFinalize(plan), 0);
        let mut size = -1i64;
        let workspace = c::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
        assert_eq!(get(plan, workspace, c::CUDNN_TYPE_INT64, &mut size), 1);
        assert_eq!(size, WORKSPACE);
    }

    #[test]
    fn strangers_are_refused() {
        let bad = core::ptr::without_provenance_mut(16);
        assert_eq!(cudnnBackendFinalize(bad), DNN.bad_value());
        let plan = create(c::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        let place = input(&bad);
        let name = c::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
        let descriptor = c::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        assert_eq!(cudnnBackendSetAttribute(plan, name, descriptor, 1, place), DNN.bad_value());
        let mut count = 0i64;
        let (count, place) = (output(&mut count), output(&mut 0u8));
        let status = cudnnBackendGetAttribute(plan, 99_999, descriptor, 0, count, place);
        assert_eq!(status, c::CUDNN_STATUS_NOT_SUPPORTED);
    }
}
