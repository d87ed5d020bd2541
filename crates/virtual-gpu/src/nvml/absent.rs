//! What the virtual GPU has none of: sensors, links, parts.
//!
//! NVML has an answer for cards that lack them, and monitoring programs expect to get it. So unlike
//! a function that is missing here, these say nothing on standard error.

use super::{Code, answer, device};
use crate::constants as c;

macro_rules! absent {
    ($(fn $name:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(of: u64) -> Code {
                answer(|| device(of).and(Err(c::NVML_ERROR_NOT_SUPPORTED)))
            }
        )*
    };
}

absent! {
    fn nvmlDeviceGetTemperature;
    fn nvmlDeviceGetTemperatureV;
    fn nvmlDeviceGetTemperatureThreshold;
    fn nvmlDeviceGetPowerUsage;
    fn nvmlDeviceGetPowerManagementLimit;
    fn nvmlDeviceGetPowerManagementDefaultLimit;
    fn nvmlDeviceGetEnforcedPowerLimit;
    fn nvmlDeviceGetTotalEnergyConsumption;
    fn nvmlDeviceGetFanSpeed;
    fn nvmlDeviceGetFanSpeed_v2;
    fn nvmlDeviceGetNumFans;
    fn nvmlDeviceGetTotalEccErrors;
    fn nvmlDeviceGetMemoryErrorCounter;
    fn nvmlDeviceGetPcieThroughput;
    fn nvmlDeviceGetPcieReplayCounter;
    fn nvmlDeviceGetSerial;
    fn nvmlDeviceGetBoardPartNumber;
    fn nvmlDeviceGetVbiosVersion;
    fn nvmlDeviceGetNvLinkState;
    fn nvmlDeviceGetNvLinkVersion;
    fn nvmlDeviceGetNvLinkCapability;
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2;
    fn nvmlDeviceGetNvLinkRemoteDeviceType;
    fn nvmlDeviceGetGpuFabricInfo;
    fn nvmlDeviceGetFieldValues;
    fn nvmlDeviceGetMigMode;
    fn nvmlDeviceGetMaxMigDeviceCount;
    fn nvmlDeviceGetCpuAffinity;
    fn nvmlDeviceSetCpuAffinity;
    fn nvmlDeviceClearCpuAffinity;
    fn nvmlDeviceGetAddressingMode;
    fn nvmlDeviceGetPlatformInfo;
    fn nvmlDeviceGetNumaNodeId;
}
