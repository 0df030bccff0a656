import mcbn
from trained import diabetes

net, train_loader, (x_val, y_val), (x, y) = diabetes()  # your network and data

bayes = mcbn.MCBN(net, "regression").fit(train_loader, n_samples=100)
bayes.tune((x_val[:32], y_val[:32]))  # the noise of the targets
bayes.calibrate((x_val[32:], y_val[32:]))  # intervals that hold on new data
pred = bayes.predict(x)

low, high = pred.interval(0.9)
inside = (low < y) & (y < high)
for i in range(3):
    print(f"{pred.mean[i]:5.2f} ± {pred.std[i]:.2f}, 90 % between {low[i]:5.2f} and {high[i]:5.2f}")
print(f"inside the 90 % interval: {inside.float().mean():.0%} of {len(y)}")
